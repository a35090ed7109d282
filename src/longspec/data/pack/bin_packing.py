"""Decide which part of which document stands in which row: cut to a row's length, best fit, fill up.

Only lengths decide, so a corpus of any size is placed without reading its tokens. P: pieces, D: documents, R: rows.
"""

import heapq
import itertools
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SHORTEST = 2  # tokens in a piece: a lone token has nothing to predict
PADDING = 0.01  # share of padding above which documents that are cut anyway are cut so that they fill rows up
SMALLEST_GAP = 16  # only gaps of at least a row's length over this are filled up, since a short piece has little context


@dataclass(frozen=True)
class Pieces:
    """Hold parts of documents; each piece is a document of its own in its row."""

    document_P: NDArray[np.int64]
    start_P: NDArray[np.int64]
    length_P: NDArray[np.int64]
    cut_tokens: int  # tokens of the documents that are in no piece


def cut(lengths_D: NDArray[np.int64], sequence_length: int, overlong: str) -> Pieces:
    """Cut documents to a row's length. overlong: `split` makes further pieces of the rest, `truncate` drops it."""
    per_document = -(-lengths_D // sequence_length) if overlong == "split" else np.minimum(lengths_D, 1)
    document_P = np.repeat(np.arange(len(lengths_D)), per_document)
    first_P = np.repeat(np.cumsum(per_document) - per_document, per_document)
    start_P = (np.arange(len(document_P)) - first_P) * sequence_length
    length_P = np.minimum(lengths_D[document_P] - start_P, sequence_length)
    keep = length_P >= SHORTEST
    cut_tokens = int(lengths_D.sum() - length_P[keep].sum())
    return Pieces(document_P[keep], start_P[keep], length_P[keep], cut_tokens)


def best_fit(length_P: NDArray[np.int64], sequence_length: int) -> NDArray[np.int64]:
    """Return the row of each piece [P]: the longest piece first, each into the fullest row that still holds it."""
    rows = 0
    row_of = [0] * len(length_P)
    rows_by_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # the keys of rows_by_space, sorted: at most one for each possible length
    order = np.argsort(-length_P, kind="stable")
    for piece, length in zip(order.tolist(), length_P[order].tolist(), strict=True):
        at = bisect_left(spaces, length)
        if at == len(spaces):
            space, row = sequence_length, rows
            rows += 1
        else:
            space = spaces[at]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                del rows_by_space[space], spaces[at]
        row_of[piece] = row
        left = space - length
        if left >= SHORTEST:
            if left not in rows_by_space:
                insort(spaces, left)
            rows_by_space.setdefault(left, []).append(row)
    return np.array(row_of, dtype=np.int64)


def _to_dissolve(pieces: Pieces, row_P: NDArray[np.int64], sequence_length: int) -> NDArray[np.int64]:
    """Return the rows to dissolve, whose tokens fill up others: as many as are too many, with as few tokens as possible.

    They hold nothing but pieces of documents that are cut anyway: no document that fits a row is cut to save padding.
    """
    used_R = np.bincount(row_P, weights=pieces.length_P).astype(np.int64)
    surplus = len(used_R) - int(np.ceil(used_R.sum() / sequence_length / (1 - PADDING)))
    per_document = np.bincount(pieces.document_P)
    whole_R = np.bincount(row_P, weights=per_document[pieces.document_P] == 1)
    loose = np.flatnonzero(whole_R == 0)
    loose = loose[np.argsort(used_R[loose], kind="stable")][: max(0, surplus)]
    gap_R = sequence_length - used_R
    gap_R[gap_R < _smallest_gap(sequence_length)] = 0
    # The gaps of these rows themselves cannot be filled, so each further row leaves less room for more tokens.
    fits = np.cumsum(used_R[loose]) <= gap_R.sum() - np.cumsum(gap_R[loose])
    return loose[: int(fits.sum())]


def _smallest_gap(sequence_length: int) -> int:
    return max(2 * SHORTEST, sequence_length // SMALLEST_GAP)


def fill_up(pieces: Pieces, row_P: NDArray[np.int64], sequence_length: int) -> tuple[Pieces, NDArray[np.int64]]:
    """Cut padding: dissolve some rows and cut their tokens to fit the gaps of others. Returns pieces and their rows.

    Nothing changes if at most PADDING of all rows is padding, or if no document is cut anyway.
    """
    dissolved = _to_dissolve(pieces, row_P, sequence_length)
    if not len(dissolved):
        return pieces, row_P
    gap_R = sequence_length - np.bincount(row_P, weights=pieces.length_P).astype(np.int64)
    gap_R[dissolved] = 0
    new_rows, smallest = itertools.count(len(gap_R)), _smallest_gap(sequence_length)
    gaps = [(-gap, row) for row, gap in enumerate(gap_R.tolist()) if gap >= smallest]  # the largest first
    heapq.heapify(gaps)
    moved = np.isin(row_P, dissolved)
    made = []
    for piece in np.flatnonzero(moved).tolist():
        start, left = int(pieces.start_P[piece]), int(pieces.length_P[piece])
        while left:
            # Tokens that no gap holds begin a new row.
            space, row = heapq.heappop(gaps) if gaps else (-sequence_length, next(new_rows))
            tokens = min(-space, left)
            if 0 < left - tokens < SHORTEST:
                tokens -= SHORTEST - (left - tokens)
            made.append((int(pieces.document_P[piece]), start, tokens, row))
            start, left = start + tokens, left - tokens
            if -space - tokens >= smallest:
                heapq.heappush(gaps, (space + tokens, row))
    before = (pieces.document_P, pieces.start_P, pieces.length_P, row_P)
    joined = [np.concatenate([old[~moved], new]) for old, new in zip(before, np.array(made, dtype=np.int64).T, strict=True)]
    order = np.lexsort((joined[1], joined[0]))
    document_P, start_P, length_P, row_P = (each[order] for each in joined)
    return Pieces(document_P, start_P, length_P, pieces.cut_tokens), row_P


def _in_rows(pieces: Pieces, row_P: NDArray[np.int64]) -> tuple[Pieces, NDArray[np.int64]]:
    """Return pieces ordered by row, and edges_R1. Pieces keep their order in a row, rows that of their first pieces."""
    used, first, row_P = np.unique(row_P, return_index=True, return_inverse=True)
    place_of_row = np.empty(len(used), dtype=np.int64)
    place_of_row[np.argsort(first)] = np.arange(len(used))
    row_P = place_of_row[row_P]
    order = np.argsort(row_P, kind="stable")
    edges_R1 = np.concatenate([[0], np.cumsum(np.bincount(row_P, minlength=len(used)))])
    ordered = Pieces(pieces.document_P[order], pieces.start_P[order], pieces.length_P[order], pieces.cut_tokens)
    return ordered, edges_R1


def place(lengths_D: NDArray[np.int64], sequence_length: int, overlong: str) -> tuple[Pieces, NDArray[np.int64]]:
    """Place documents of these lengths in rows of `sequence_length`. overlong: one of config.OVERLONG.

    Returns the pieces in the order in which they stand in the rows, and edges_R1: row r holds pieces edges_R1[r] to
    edges_R1[r + 1].
    """
    pieces = cut(lengths_D, sequence_length, overlong)
    return _in_rows(*fill_up(pieces, best_fit(pieces.length_P, sequence_length), sequence_length))


def histogram(lengths: NDArray[np.int64]) -> dict[str, int]:
    """Return the number of lengths below each power of two and not below the one before."""
    counts = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1) + 1)).astype(np.int64))
    return {str(2**power): int(count) for power, count in enumerate(counts) if count}
