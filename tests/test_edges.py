"""Cases at the top of the package that no other default test has; each finds a fault of `tests/mutants.json`."""

from vlkv.errors import LONGEST, shortened


def test_a_message_of_the_greatest_length_stays_as_it_is():
    message = "word " * (LONGEST // 5) + "x" * (LONGEST % 5)
    assert len(message) == LONGEST and shortened(message) == message
    assert shortened(message + "x").split() == [*["word"] * 26, "...", *["word"] * 12, "x"]
