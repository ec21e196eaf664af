"""Transcripts of what masks refuse: a call, and below it, indented, the whole message."""

from __future__ import annotations

COUNT = "needed an integer of 0 or more, or an integer array"
NEIGHBOURS = "needed a number of neighbours, 0 or more, or None for no limit"
PLACES = 'needed "top_left", "bottom_right", a key position (integer), or an integer array of them'


def transcript(text: str) -> list[tuple[str, str]]:
    """Read (call, message) pairs."""
    pairs: list[tuple[str, list[str]]] = []
    for line in text.strip().splitlines():
        if line.startswith("    "):
            pairs[-1][1].append(line.strip())
        else:
            pairs.append((line, []))
    said = {"<COUNT>": COUNT, "<NEIGHBOURS>": NEIGHBOURS, "<PLACES>": PLACES}
    out = []
    for call, lines in pairs:
        message = " ".join(lines)
        for name, words in said.items():
            message = message.replace(name, words)
        out.append((call, message))
    return out


MADE = """
ValidLens(-1)
    lens: given -1, <COUNT>
ValidLens(I([2, -3]))
    lens: given int64[2] holding -3, <COUNT>
ValidLens(2.0)
    lens: given 2.0, <COUNT>
ValidLens(True)
    lens: given True, <COUNT>
ValidLens(None)
    lens: given None, <COUNT>
ValidLens('3')
    lens: given '3', <COUNT>
ValidLens([1.0, 2.0])
    lens: given float64[2], <COUNT>; convert it to an integer dtype
ValidLens(I([True]))
    lens: given bool[1], <COUNT>; convert it to an integer dtype
ValidLens(2, pad='top')
    pad: given 'top', needed "right" or "left"
ValidLens(np.zeros((1, 1, 1, 1), int))
    lens: given int64[1, 1, 1, 1], needed at most three axes (B|1, H|1, L|1)
ValidLens(2, query_lens=-2)
    query_lens: given -2, <COUNT>
SlidingWindow(back=-1)
    back: given -1, <NEIGHBOURS>
SlidingWindow(back=0, ahead=-2)
    ahead: given -2, <NEIGHBOURS>
SlidingWindow(back=I([0, -1]))
    back: given int64[2] holding -1, <NEIGHBOURS>
SlidingWindow(back=1.5)
    back: given 1.5, <NEIGHBOURS>
SlidingWindow.last(0)
    keys: given 0, needed 1 key or more (the query's own counts)
SlidingWindow.last(-1)
    keys: given -1, needed 1 key or more (the query's own counts)
SlidingWindow.last('2')
    keys: given '2', needed 1 key or more (the query's own counts)
SlidingWindow.last(None)
    keys: given None, needed 1 key or more (the query's own counts)
FirstKeys(-1)
    count: given -1, <COUNT>
PrefixLM(-1)
    length: given -1, <COUNT>
PrefixLM([0.5])
    length: given float64[1], <COUNT>; convert it to an integer dtype
Strided(0)
    step: given 0, needed a distance of 1 or more keys
Strided(I([1, 0]))
    step: given int64[2] holding 0, needed a distance of 1 or more keys
Strided(2, phase=0.5)
    phase: given 0.5, needed a phase of 0 or more, below the step
Strided(2, phase=-1)
    phase: given -1, needed a phase of 0 or more, below the step
Strided(2, phase=2)
    phase: given 2, needed a phase of 0 or more, below the step of 2
Strided(2, phase=I([0, 3]))
    phase: given int64[2], needed a phase of 0 or more, below the step of 2
Causal(align='bottom')
    align: given 'bottom', <PLACES>
Causal(align=0.5)
    align: given 0.5, <PLACES>
Causal(align=2 ** 29)
    align: given 536870912, needed positions between -536870911 and 536870911
Causal(align=I([0, -2 ** 30]))
    align: given int64[2], needed positions between -536870911 and 536870911
Dense(np.zeros((2, 4), np.float32))
    mask: given float32[2, 4], needed booleans (True = may attend); a float array is a bias: pass 0/-inf
    values as bias=, or write mask != 0 for 1/0 values and mask == 0 for 0/-inf values
Dense(I([1, 1, 2, 0]))
    mask: given int64[4] with values from 0 to 2, needed booleans, or integers that are all 0 or 1 (True
    = may attend); did you mean valid_lens? Lengths go into masks.ValidLens(lens), document ids into
    masks.Documents(ids)
Dense(I([-1, 0]))
    mask: given int64[2] with values from -1 to 0, needed booleans, or integers that are all 0 or 1
    (True = may attend); did you mean valid_lens? Lengths go into masks.ValidLens(lens), document ids
    into masks.Documents(ids)
Dense(I([1j]))
    mask: given complex128[1], needed booleans (True = may attend)
Dense(3)
    mask: given 3, needed a boolean array
Dense(I(True))
    mask: given bool[], needed one to four axes: (S,), (L, S), (B, L, S) or (B, H, L, S)
Dense(np.ones((1, 1, 1, 1, 1), bool))
    mask: given bool[1, 1, 1, 1, 1], needed one to four axes: (S,), (L, S), (B, L, S) or (B, H, L, S)
Causal() & 3
    mask: given 3, needed a mask of attnspan.masks or a boolean array; None means that every query sees
    every key
Causal() | None
    mask: given None, needed a mask of attnspan.masks or a boolean array; None means that every query
    sees every key
Causal() & Causal
    mask: given the class Causal, needed a mask; write Causal(...)
Causal().picture(3, 3, width=0)
    width: given 0, needed 1 or more cells a line
Predicate(3)
    fn: given 3, needed a function fn(q, k) of integer arrays that returns booleans
Documents([0.0, 1.0])
    Documents.ids: given float64[2], needed an integer array (L,) or (B, L)
Documents(I([True]))
    Documents.ids: given bool[1], needed an integer array (L,) or (B, L)
Documents(3)
    Documents.ids: given 3, needed an integer array (L,) or (B, L)
Documents(None)
    Documents.ids: given None, needed an integer array (L,) or (B, L)
Documents([[[0]]])
    Documents.ids: given int64[1, 1, 1], needed an integer array (L,) or (B, L)
Documents([0], key_ids=[0.5])
    Documents.key_ids: given float64[1], needed an integer array (L,) or (B, L)
Documents([0, 2 ** 31])
    Documents.ids: given int64[2] with values from 0 to 2147483648, needed ids that fit int32; number
    the documents: np.unique(ids, return_inverse=True)[1]
Documents([0, 1, 0], contiguous=True)
    contiguous: given True, for documents that return after another document, needed documents that are
    one run of keys each; leave it out: such masks are kept as bits
Documents([[0, 0, 1], [0, 1, 0]], contiguous=True)
    contiguous: given True, for documents that return after another document, needed documents that are
    one run of keys each; leave it out: such masks are kept as bits
Documents([0], each=np.eye(1))
    each: given float64[1, 1], needed a mask, such as Causal()
Documents([0], key_ids=[0], each=~Causal())
    each: given ~Causal(), needed its alignment said: with key lengths of their own, documents have L !=
    S; write Causal(align="bottom_right") or "top_left"
Documents.from_lengths([1], [2], each=Causal(align=0) & SlidingWindow(back=1))
    each: given Causal(align=0) & SlidingWindow(back=1), needed its alignment said: with key lengths of
    their own, documents have L != S; write SlidingWindow(align="bottom_right") or "top_left"
Documents.from_lengths([2, -1])
    lengths: given int64[2] holding -1, needed lengths of 0 or more
Documents.from_lengths([0.5])
    lengths: given float64[1], needed an integer array (N,) or (B, N)
Documents.from_lengths(3)
    lengths: given 3, needed an integer array (N,) or (B, N)
Documents.from_lengths(I(3))
    lengths: given int64[], needed an integer array (N,) or (B, N)
Documents.from_lengths([1], I([[[1]]]))
    key_lengths: given int64[1, 1, 1], needed an integer array (N,) or (B, N)
Documents.from_offsets([0, 2, 1, 4])
    offsets: given [0, 2, 1, 4], needed offsets that start at 0 and do not decrease
Documents.from_offsets([1, 4])
    offsets: given [1, 4], needed offsets that start at 0 and do not decrease
Documents.from_offsets([0, 4], [[0, 3], [1, 3]])
    key_offsets: given [[0, 3], [1, 3]], needed offsets that start at 0 and do not decrease
Documents.from_offsets([])
    offsets: given int64[0], needed an integer array (N + 1,) or (B, N + 1)
Documents.from_offsets([0.0, 4.0])
    offsets: given float64[2], needed an integer array (N + 1,) or (B, N + 1)
Documents.from_offsets([0, 2, 4], [0, 4])
    key_offsets: given int64[2], needed as many documents as offsets int64[3]
"""


USED = """
ValidLens(6) -> 4 x 5
    ValidLens.lens: given 6, needed lengths between 0 and S = 5
ValidLens([1, 9]) -> 4 x 5
    ValidLens.lens: given int64[2] with values from 1 to 9, needed lengths between 0 and S = 5
ValidLens(1, query_lens=[1, 5]) -> 4 x 5
    ValidLens.query_lens: given int64[2] with values from 1 to 5, needed lengths between 0 and L = 4
PrefixLM(6, align=0) -> 4 x 5
    PrefixLM.length: given 6, needed lengths between 0 and S = 5
Dense(np.ones((2, 4, 4), bool)) -> 4 x 5
    mask: given bool[2, 4, 4], needed (..., L, S) = (..., 4 or 1, 5 or 1); a mask is made for one pair
    of lengths; symbolic masks fit all
Dense(np.ones((5, 4), bool)) -> 4 x 5
    mask: given bool[5, 4], needed (..., L, S) = (..., 4 or 1, 5 or 1); its last two axes are (queries,
    keys): transpose it
Dense(np.ones(4, bool)) -> 4 x 5
    mask: given bool[4], needed (..., L, S) = (..., 4 or 1, 5 or 1); a mask is made for one pair of
    lengths; symbolic masks fit all
Causal().slice(6, 6, keys=slice(1, 6)) -> 4 x 5
    mask: given a slice made for 6 queries and 5 keys, needed one for 4 queries and 5 keys
Documents([0] * 4) -> 4 x 5
    Documents: given ids int64[4] for 4 queries and 5 keys, needed key_ids= where the lengths differ
Documents([0] * 3) -> 4 x 4
    Documents.ids: given int64[3], needed one id per position, 4 of them
Documents([0] * 4, key_ids=[0] * 4) -> 4 x 5
    Documents.key_ids: given int64[4], needed one id per position, 5 of them
Documents.from_lengths([4]) -> 4 x 5
    Documents: given one list of lengths for 4 queries and 5 keys, needed the documents' key lengths
    too, where the lengths differ
Documents.from_lengths([3, 2]) -> 4 x 4
    Documents offsets: given documents that end at 5, needed documents that end at 4 or before
Documents.from_lengths([4], [6]) -> 4 x 5
    Documents key_offsets: given documents that end at 6, needed documents that end at 5 or before
Documents.from_offsets([0, 3]) -> 4 x 4
    Documents offsets: given documents that end at 3, needed documents that end at 4
Documents.from_offsets([[0, 4], [0, 3]]) -> 4 x 4
    Documents offsets: given documents that end at 3, needed documents that end at 4
Everything() -> -1 x 5
    L: given -1, needed a length, an integer between 0 and 536870911
Everything() -> 4 x 536870912
    S: given 536870912, needed a length, an integer between 0 and 536870911
Predicate(lambda q, k: q - k) -> 4 x 5
    Predicate.fn: given int32[1, 1, 4, 5], needed booleans from fn(q, k); compare, as in q - k < 3
"""


AXES = """
ValidLens([1, 2, 3])
    ValidLens.lens: given int64[3], needed B = 2 (or 1) on axis 0; a 1-D array means sequences, never
    heads: for heads write lens[None, :]
ValidLens([1, 2, 3, 4])
    ValidLens.lens: given int64[4], needed B = 2 (or 1) on axis 0
Causal(align=[0, 1, 2])
    Causal.align: given int64[3], needed B = 2 (or 1) on axis 0; a 1-D array means sequences, never
    heads: for heads write align[None, :]
SlidingWindow(back=[0, 1, 2])
    SlidingWindow.back: given int64[3], needed B = 2 (or 1) on axis 0; a 1-D array means sequences,
    never heads: for heads write back[None, :]
FirstKeys([[1, 2]])
    FirstKeys.count: given int64[1, 2], needed H = 3 (or 1) on axis 1
FirstKeys(np.ones((2, 3, 4), int))
    FirstKeys.count: given int64[2, 3, 4], needed a number, (B,) one per sequence, or (B|1, H|1) one per
    head
ValidLens(np.ones((2, 3, 7), int))
    ValidLens.lens: given int64[2, 3, 7], needed (2,), (2, 5), (2 or 1, 3 or 1) or (2 or 1, 3 or 1, 5 or
    1)
ValidLens(np.ones((2, 7), int))
    ValidLens.lens: given int64[2, 7], needed (2,), (2, 5), (2 or 1, 3 or 1) or (2 or 1, 3 or 1, 5 or 1)
ValidLens(2, query_lens=[1, 2, 3])
    ValidLens.query_lens: given int64[3], needed B = 2 (or 1) on axis 0; a 1-D array means sequences,
    never heads: for heads write query_lens[None, :]
Documents(np.zeros((3, 5), int))
    Documents.ids: given int64[3, 5], needed B = 2 (or 1) on axis 0
Documents([0] * 5, key_ids=np.zeros((3, 5), int))
    Documents.key_ids: given int64[3, 5], needed B = 2 (or 1) on axis 0
Documents.from_lengths([[5]] * 3)
    offsets: given int64[3, 2], needed B = 2 (or 1) on axis 0
Documents([0] * 5, each=FirstKeys([1, 2, 3]))
    FirstKeys.count: given int64[3], needed B = 2 (or 1) on axis 0; a 1-D array means sequences, never
    heads: for heads write count[None, :]
Documents.from_lengths([5], each=FirstKeys([[1, 2]]))
    FirstKeys.count: given int64[1, 2], needed H = 3 (or 1) on axis 1
Dense(np.ones((3, 3, 5, 5), bool))
    mask: given bool[3, 3, 5, 5], needed B = 2 (or 1) on axis 0
Dense(np.ones((2, 2, 5, 5), bool))
    mask: given bool[2, 2, 5, 5], needed H = 3 (or 1) on axis 1; masks are (B|1, H|1, L|1, S|1)
Dense(np.ones((2, 5), bool))
    mask: given bool[2, 5], needed (..., L, S) = (..., 5 or 1, 5 or 1); for the keys of each sequence
    (B, S) write mask[:, None, None, :] (3-D: [:, None, :])
Causal().slice(6, 6, queries=slice(1, 6), keys=slice(5)) & FirstKeys([1] * 3)
    FirstKeys.count: given int64[3], needed B = 2 (or 1) on axis 0; a 1-D array means sequences, never
    heads: for heads write count[None, :]
FirstKeys([1] * 4).slice(6, 6, queries=slice(1, 6), keys=slice(5))
    FirstKeys.count: given int64[4], needed B = 2 (or 1) on axis 0
"""
