"""A first SIGINT or SIGTERM asks for a stop, a second one is nobody's to catch."""

import signal

import pytest

from meshpar.train.faults import StopRequest

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(params=SIGNALS)
def handled(request):
    """A signal, and the list that its handler appends to."""
    received = []
    before = signal.signal(request.param, lambda number, frame: received.append(number))
    yield request.param, received
    signal.signal(request.param, before)


def test_nothing_is_requested_before_a_signal():
    with StopRequest() as stop:
        assert not stop.requested


def test_the_first_signal_is_noted_and_the_second_is_handled_as_before(handled):
    number, received = handled
    with StopRequest() as stop:
        signal.raise_signal(number)
        assert stop.requested
        assert received == []
        signal.raise_signal(number)
        assert received == [number]


@pytest.fixture
def ctrl_c_as_in_a_terminal():
    """A shell's background job ignores Ctrl-C; Python in a terminal does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_as_in_a_terminal")
def test_a_second_ctrl_c_interrupts_python():
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("body_raises", [False, True])
def test_the_handlers_are_as_before_however_the_block_ends(body_raises):
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        with StopRequest():
            inside = [signal.getsignal(number) for number in SIGNALS]
            if body_raises:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert all(old is not new for old, new in zip(before, inside, strict=True))
    assert [signal.getsignal(number) for number in SIGNALS] == before
