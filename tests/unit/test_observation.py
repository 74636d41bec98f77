"""The observation text: fixed examples and totality."""

from hypothesis import given
from hypothesis import strategies as st

from stages.harness.observation import tidy


def test_examples():
    assert tidy(b"", 0, False) == ""
    assert tidy(b"", 1, False) == "err failed"
    assert tidy(b"a\nb\n", 0, False) == "a ; b"
    assert tidy(b"bash: line 3: foo: command not found\n", 127, False) == "err foo: command not found"
    assert tidy(b"/usr/bin/bash: eval: line 12: unexpected EOF\n", 2, False) == "err unexpected EOF"
    assert tidy(b"mv: cannot stat 'x'\n", 1, False) == tidy("mv: cannot stat ‘x’\n".encode(), 1, False)
    assert tidy(b"partial", None, True) == "err timeout"
    assert tidy(b"bye", None, False) == "err shell ended"
    assert tidy(b"a\x00\x1b[1mb\tc  d\r\n", 0, False) == "a[1mb c d"
    assert tidy(b"x" * 500, 0, False) == "x" * 64
    assert tidy(b"x" * 500, 2, False, 10) == "err xxxxxx"


def test_a_name_that_holds_the_word_bash_stays():
    assert tidy(b"rebash: line 3: x\n", 0, False) == "rebash: line 3: x"


@given(st.binary(max_size=3000), st.one_of(st.none(), st.integers(0, 255)), st.booleans(), st.integers(1, 200))
def test_total_one_short_printable_line(output, code, timed_out, limit):
    text = tidy(output, code, timed_out, limit)
    assert len(text) <= limit
    assert not any(ord(c) < 32 or ord(c) == 127 for c in text)
    assert text == tidy(output, code, timed_out, limit)
    if code not in (0,) or timed_out:
        assert text.startswith("err "[:limit])
