"""The best one-to-one matching of rows and columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def best_matching(gain: NDArray[np.float64]) -> NDArray[np.int64]:
    """Column [rows] given to each row so that the sum of `gain` [rows, columns] is the largest; -1: none is left.

    Exact (Kuhn and Munkres): one shortest augmenting path a row, of which every step is one operation on a whole row,
    so 1000 x 1000 take seconds. Raises `ValueError` for values that are no numbers.

    >>> best_matching(np.array([[1.0, 2.0], [1.0, 9.0]])).tolist()
    [0, 1]
    """
    gain = np.asarray(gain, np.float64)
    if gain.ndim != 2 or not np.isfinite(gain).all():
        raise ValueError(f"a matching needs finite values [rows, columns], not these of shape {list(gain.shape)}")
    rows, columns = gain.shape
    matched = np.full(rows, -1)
    if rows > columns:
        wide = best_matching(gain.T)
        matched[wide] = np.arange(columns)
        return matched
    cost = -gain
    row_price, column_price = np.zeros(rows), np.zeros(columns)
    owner = np.full(columns, -1)  # row that a column belongs to so far
    for row in range(rows):
        slack, came_from = np.full(columns, np.inf), np.full(columns, -1)
        done = np.zeros(columns, bool)
        current, column = row, -1
        while True:
            reduced = cost[current] - row_price[current] - column_price
            closer = ~done & (reduced < slack)
            slack[closer], came_from[closer] = reduced[closer], column
            column = int(np.where(done, np.inf, slack).argmin())
            step = slack[column]
            row_price[owner[done]] += step
            row_price[row] += step
            column_price[done] -= step
            slack[~done] -= step
            done[column] = True
            if owner[column] < 0:
                break
            current = int(owner[column])
        while column >= 0:  # turn the path over, from its free column back to the new row
            before = int(came_from[column])
            owner[column] = row if before < 0 else owner[before]
            column = before
    matched[owner[owner >= 0]] = np.flatnonzero(owner >= 0)
    return matched
