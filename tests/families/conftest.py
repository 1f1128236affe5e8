"""The models of `RECORDS`, each made once by a worker."""

import functools

import pytest


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """saved(name): transformers' model of a record, its folder, our parameters, and prompts."""
    from tests.families.common import save
    from tests.families.test_every_family import RECORDS

    @functools.cache
    def of(name: str):
        record = RECORDS[name]
        made = save(record.make(), tmp_path_factory.mktemp("record") / name, write=record.write)
        return made._replace(rows=record.rows(made.params.config))

    return of
