"""Operands whose rows (the sequence) are split over tensor-parallel ranks: cast where they are, then gathered.

What travels is the payload of the one direction that a gemm is about to read, codes and scales; sharding.py says when
that is possible and what is done elsewhere. Every function starts the transfer and returns a function that waits
for it, so that the caller can put work in between.
"""

from __future__ import annotations

import functools

import torch

from .formats import COLUMNWISE, ROWWISE
from .plan import GRAD_OUTPUT, INPUT, ORIGINAL
from .quantizer import as_matrix
from .sharding import PAYLOAD, ROW_PAYLOAD, same_codes
from .storage import QuantizedStorage
from .storage_layout import join_rows, relayout, row_dims


def start_payload(comm, s: QuantizedStorage):
    """Start gathering the rows of a payload from all ranks, each with as many; `finish()` gives the whole payload."""
    names = [name for name, dim in row_dims(s).items() if dim is not None]
    wait = comm.start_gather(*(getattr(s, name).contiguous() for name in names))
    return lambda: join_rows(s, dict(zip(names, wait())), comm.size)


def start_input(call, x: torch.Tensor, keep: bool):
    """(`finish` -> the whole input's rowwise payload for fprop, what is kept of this rank's rows for backward)."""
    plan, rows = call.plan, as_matrix(x).shape[0]
    row, kept = plan.gather(ROWWISE, rows), plan.kept_of_gathered(rows) if keep else None
    travels = row == PAYLOAD
    wanted = dict(rowwise=travels or kept == ROWWISE, columnwise=kept == COLUMNWISE)
    own_row, own_col = call.cast(INPUT, x, **wanted) if any(wanted.values()) else (None, None)
    plan.gathers[INPUT, ROWWISE, row] += 1
    if travels:
        finish = start_payload(call.comm, own_row)
    else:
        wait = call.comm.start_gather(as_matrix(x).contiguous())

        def finish():
            return call.cast(INPUT, wait()[0], rowwise=True, whole=True)[0]

    return finish, {None: None, ROWWISE: own_row, COLUMNWISE: own_col, ORIGINAL: x}[kept]


def start_input_column(call, kept: torch.Tensor | QuantizedStorage):
    """`finish` -> the whole input's columnwise payload for wgrad, from what `start_input` kept."""
    plan, comm = call.plan, call.comm
    is_tensor = isinstance(kept, torch.Tensor)
    way = plan.gather(COLUMNWISE, as_matrix(kept).shape[0] if is_tensor else kept.shape[0])
    plan.gathers[INPUT, COLUMNWISE, way] += 1
    if way == PAYLOAD:
        return start_payload(comm, call.columnwise(INPUT, kept))
    if not is_tensor:
        wait = start_payload(comm, kept)
        return lambda: call.columnwise(INPUT, wait(), whole=True)
    if way == ROW_PAYLOAD:
        wait = start_payload(comm, call.cast(INPUT, kept, rowwise=True)[0])
        return lambda: call.columnwise(INPUT, wait(), whole=True)
    wait = comm.start_gather(as_matrix(kept).contiguous())
    return lambda: call.columnwise(INPUT, wait()[0], whole=True)


def start_grad_output(call, dy: torch.Tensor, *, rowwise: bool, columnwise: bool, amax=None):
    """(`finish` -> rowwise, `finish` -> columnwise payload) of the whole output gradient, each where it is wanted.

    amax: see `LinearCall.cast`. The row is on the wire first, and the column travels while dgrad runs. `finish` of
    the row comes first.
    """
    plan, comm, rows = call.plan, call.comm, as_matrix(dy).shape[0]
    row, col = plan.gather(ROWWISE, rows), plan.gather(COLUMNWISE, rows)
    row_travels = row == PAYLOAD and (rowwise or (columnwise and col == ROW_PAYLOAD))
    col_travels = columnwise and col == PAYLOAD
    own_row, own_col = None, None
    if row_travels or col_travels:
        known = amax if rowwise or not row_travels else None  # a row for the column's sake has an amax of its own
        own_row, own_col = call.cast(GRAD_OUTPUT, dy, rowwise=row_travels, columnwise=col_travels, amax=known)
    for wanted, direction, way in ((rowwise, ROWWISE, row), (columnwise, COLUMNWISE, col)):
        plan.gathers[GRAD_OUTPUT, direction, way] += wanted
    get_row = functools.cache(start_payload(comm, own_row)) if row_travels else None
    if (rowwise and get_row is None) or (columnwise and not col_travels and col != ROW_PAYLOAD):
        get_whole = functools.cache(comm.start_gather(as_matrix(dy).contiguous()))
    get_col = start_payload(comm, own_col) if col_travels else None
    if get_row is None:
        get_row = functools.cache(lambda: call.cast(GRAD_OUTPUT, get_whole()[0], rowwise=True, whole=True)[0])
    if get_col is None and col == ROW_PAYLOAD:
        get_col = lambda: column_of(call, get_row())  # noqa: E731
    elif get_col is None:
        get_col = lambda: call.cast(GRAD_OUTPUT, get_whole()[0], columnwise=True, whole=True)[1]  # noqa: E731
    return get_row, get_col


def column_of(call, row: QuantizedStorage) -> QuantizedStorage:
    """The columnwise payload of a gathered gradient from its rowwise one: its decode cast, or the same codes."""
    quantizer = call.plan.quantizers[GRAD_OUTPUT]
    if quantizer.derives_columnwise or not same_codes(*quantizer.formats()):
        return call.columnwise(GRAD_OUTPUT, row, whole=True)
    return relayout(row.changed(direction=COLUMNWISE), call.plan.transposed(GRAD_OUTPUT))
