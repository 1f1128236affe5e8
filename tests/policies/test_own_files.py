"""The text of a policy of one's own, whose file may have any path."""

from __future__ import annotations

import pytest

import vlkv
from vlkv import policies

OWN = "from vlkv import policies\nclass Own(policies.PyramidKV):\n    pass\n"


@pytest.mark.parametrize(
    "name", ["a b", "é 文", "a(1)", "a,b", "a#b", "a+b", "a@b", "a\\b", "a=b", "a'b", "store=x", "[x]"]
)
def test_a_file_of_ones_own_may_have_any_path(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    text = f"{folder}/own.py:Own"
    policy = policies.make(text, keep=0.5)
    assert type(policy).__name__ == "Own"
    assert policies.make(f"{text}(keep=0.5)") == policy == policies.make(policies.text_of(policy))
    for composed in (f"compose({text}, store=kivi(bits=4))", f"compose( {text}(keep=0.5), answer=2)",
                     f"compose(snapkv(keep=0.5), allocate={text}, store=kivi(bits=4))"):  # fmt: skip
        whole = policies.make(composed, keep=0.5)
        assert policy in whole.parts and policies.make(policies.text_of(whole)) == whole


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(vlkv.InputError, match=r"C:\\Users\\me\\own\.py: no such file"):
        policies.make(r"C:\Users\me\own.py:Own", keep=0.5)
