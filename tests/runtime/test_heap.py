"""When the heap's free pages are given back."""

from voicehub_aot.runtime.heap import SLACK, HeapTrim


def test_the_heap_is_trimmed_once_the_process_has_grown(monkeypatch):
    trims = []
    sizes = iter([0, SLACK, SLACK + 1, 100, 100 + SLACK, 101 + SLACK, 0])
    monkeypatch.setattr(HeapTrim, "_resident", lambda self: next(sizes))
    heap = HeapTrim()
    heap._trim = trims.append

    heap.after_request()  # grown by SLACK
    assert trims == []
    heap.after_request()  # by more; 100 are left
    assert trims == [0]
    heap.after_request()
    assert trims == [0]
    heap.after_request()
    assert trims == [0, 0]


def test_the_size_of_this_process_is_read():
    heap = HeapTrim()

    assert heap._trim is None or heap._resident() > 2**20
