"""benchmarks.papers: every table and figure is listed, and every command's dry run works."""

import re

import pytest

from benchmarks import papers
from vlkv.policies import text_of


def test_all_tables_and_figures_are_listed():
    """As many as the papers have: 53 tables and 39 figures."""
    listed = list(papers.items())
    for paper, (tables, figures) in papers.COUNTS.items():
        names = [item.what for item in listed if item.paper == paper]
        assert names == [f"Table {i + 1}" for i in range(tables)] + [f"Figure {i + 1}" for i in range(figures)]
    assert len(listed) == 92
    assert all(item.missing for item in listed)
    for item in listed:
        if item.command:
            papers.policies_of(item.command)


@pytest.mark.full
@pytest.mark.usefixtures("shapes_for_arrays")
@pytest.mark.parametrize("paper", papers.COUNTS)
def test_the_dry_run_of_the_commands(paper):
    """Of each command; policies that differ in `keep` alone run the same code, so one of them is enough."""
    every = [
        p for item in papers.items() if item.paper == paper and item.command for p in papers.policies_of(item.command)
    ]
    different = {re.sub(r"keep=[^,)]+", "", text_of(p)): p for p in every}
    assert different
    for policy in different.values():
        papers.dry_run(policy)
