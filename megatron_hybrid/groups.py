"""Row groups of a grouped linear: where each begins and ends, on the device, and rows spread out to whole blocks.

Nothing here waits for the device unless `Groups.host` is asked for the sizes of groups that only the device knows.
"""

from __future__ import annotations

import functools

import torch

from . import ops_triton
from .permutation import RowMap, gather_rows, permute, unpermute


_EXPECTED = "expected a list of ints or an int32 or int64 tensor"


def _listed(splits) -> list[int]:
    try:
        found = list(splits)
        sum(found).__index__()  # of ints alone: one float makes the sum one
    except (TypeError, AttributeError):
        raise ValueError(f"m_splits {splits}: {_EXPECTED}") from None
    return found


class Groups:
    """`num` contiguous groups of rows of a (T, K) tensor.

    splits: rows of each group, a list or an int tensor (E,), on the CPU or where the tensor is. rows: T. device: of the
    tensor. Raises ``ValueError`` for sizes on another device, and when the sizes are known to the host and are not E
    non-negative numbers that add up to T; sizes on a GPU are not read, and must.
    host: the same sizes, where the host has a copy of those on a GPU.

    copies: a linear's x is (N, K), tokens whose copies the T rows are. sums: its y is (N, K'), of every token the sum of
    its rows. weights: what the rows of experts are multiplied by is (N, E), of these rows' tokens and experts.
    """

    copies: RowMap | None = None
    sums: RowMap | None = None
    weights: RowMap | None = None

    def __init__(self, splits, num: int, rows: int, device: torch.device, host: list[int] | None = None):
        if isinstance(splits, torch.Tensor) and (splits.dtype.is_floating_point or splits.dtype == torch.bool):
            raise ValueError(f"m_splits of {splits.dtype}: {_EXPECTED}")
        on_device = isinstance(splits, torch.Tensor) and splits.device.type != "cpu"
        self.num, self.rows, self.device = num, rows, device
        self._host = host
        if not on_device:
            self._host = splits.tolist() if isinstance(splits, torch.Tensor) else _listed(splits)
        self._device = splits if on_device else None
        self._layouts: dict[int, Layout] = {}
        if on_device and (splits.device.type != device.type or device.index not in (None, splits.device.index)):
            raise ValueError(f"m_splits on {splits.device}: expected them on {device}, where x is, or on the CPU")
        if self._host is None and splits.shape != (num,):
            raise ValueError(f"m_splits of shape {tuple(splits.shape)}: expected ({num},)")
        if self._host is not None and (len(self._host) != num or min(self._host) < 0 or sum(self._host) != rows):
            raise ValueError(f"m_splits {self._host}: expected {num} numbers >= 0 that add up to the {rows} rows of x")

    @classmethod
    def of(cls, splits, num: int, rows: int, device: torch.device) -> Groups:
        """Splits that are `Groups` already, of another linear over the same rows, share what is known of them. Raises
        ``ValueError`` for those of other rows."""
        if not isinstance(splits, cls):
            return cls(splits, num, rows, device)
        taken = splits.rows if splits.copies is None else splits.copies.num_tokens
        if (splits.num, taken, splits.device) != (num, rows, device):
            found = f"{splits.num} groups of {taken} rows on {splits.device}"
            raise ValueError(f"m_splits are {found}: expected {num} groups of the {rows} rows of x on {device}")
        return splits

    def between(
        self, *, copies: RowMap | None = None, sums: RowMap | None = None, weights: RowMap | None = None
    ) -> Groups:
        """The same groups for a linear that takes tokens, or gives them back."""
        made = object.__new__(Groups)  # copy.copy takes a multiple of the time
        made.__dict__.update(self.__dict__, copies=copies, sums=sums, weights=weights)
        return made

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """What a linear is given, as the T rows."""
        return x if self.copies is None else permute(x, self.copies)

    def result_of(self, y: torch.Tensor) -> torch.Tensor:
        """The T rows, as what a linear gives back."""
        return y if self.sums is None else unpermute(y, self.sums)

    @property
    def host(self) -> list[int]:
        """Rows of each group. Waits for the device when only it knows them."""
        if self._host is None:
            self._host = self._device.tolist()
        return self._host

    @property
    def known_to_host(self) -> bool:
        return self._host is not None

    @property
    def counts(self) -> torch.Tensor:
        """`sizes` in whatever integers there are."""
        return self.sizes if self._device is None else self._device

    @functools.cached_property
    def sizes(self) -> torch.Tensor:
        """int64 (E,) on the device."""
        if self._device is not None:
            return self._device.long()
        sizes = torch.tensor(self._host, dtype=torch.int64, device="cpu")  # whatever torch's default device is
        if self.device.type == "cuda":
            sizes = sizes.pin_memory().to(self.device, non_blocking=True)
        return sizes

    @functools.cached_property
    def ends(self) -> torch.Tensor:
        """int64 (E,): where each group ends."""
        return self.counts.cumsum(0, dtype=torch.int64)

    @functools.cached_property
    def of_row(self) -> torch.Tensor:
        """int64 (T,): the group of each row."""
        rows = torch.arange(self.rows, device=self.device)
        return torch.searchsorted(self.ends, rows, right=True).clamp_(max=self.num - 1)

    def layout(self, align: int) -> Layout:
        """The rows with every group starting at a multiple of `align`."""
        if align not in self._layouts:
            self._layouts[align] = Layout(self, align)
        return self._layouts[align]


class Layout:
    """Rows spread out so that every group begins at a multiple of `align`, with rows of zeros in between.

    rows: of the spread-out tensor. Where only the device knows the sizes there is room for any sizes, and the rows
    after the last group belong to none.
    """

    def __init__(self, groups: Groups, align: int):
        self.groups, self.align = groups, align
        if groups.known_to_host:
            self.rows = sum(-(-size // align) * align for size in groups.host)
        else:
            most = groups.rows + groups.num * (align - 1)
            self.rows = groups.rows if align == 1 else -(-most // align) * align

    @functools.cached_property
    def ends(self) -> torch.Tensor:
        """int32 (E,): where each group ends, its zeros included."""
        if self.align == 1:
            return self.groups.counts.cumsum(0, dtype=torch.int32)
        return self._padded_ends.to(torch.int32)

    @functools.cached_property
    def _padded_ends(self) -> torch.Tensor:
        if self.align == 1:
            return self.groups.ends
        return ((self.groups.sizes + (self.align - 1)) // self.align * self.align).cumsum(0)

    @functools.cached_property
    def _shift(self) -> torch.Tensor:
        """int64 (E,): how far each group is moved."""
        moved = (self._padded_ends - self.groups.ends)[:-1]
        return torch.nn.functional.pad(moved, (1, 0))

    @functools.cached_property
    def place(self) -> torch.Tensor | None:
        """int64 (T,): the row that each row is moved to; None where all stay."""
        if self.align == 1:
            return None
        return torch.arange(self.groups.rows, device=self.groups.device) + self._shift[self.groups.of_row]

    @functools.cached_property
    def source(self) -> torch.Tensor:
        """int32 (rows,): the row that each row of the spread-out tensor comes from, -1 for zeros. Only where rows move."""
        found = torch.full((self.rows,), -1, dtype=torch.int32, device=self.groups.device)
        return found.index_copy_(0, self.place, torch.arange(self.groups.rows, dtype=torch.int32, device=found.device))

    def spread(self, x: torch.Tensor, copies: RowMap | None = None) -> torch.Tensor:
        """x (T, K) -> (rows, K). copies: x is (N, K), and the T rows are copies of its rows."""
        if copies is not None:
            return copies.expand(x) if self.place is None else gather_rows(x, self._chosen(copies), copies.num_experts)
        if self.place is None:
            return x
        if ops_triton.reason(x.device) is None:
            return gather_rows(x, self.source)
        return x.new_zeros(self.rows, x.shape[1]).index_copy_(0, self.place, x)

    def _chosen(self, copies: RowMap) -> torch.Tensor:
        """`copies.choice` of the spread-out rows."""
        moved = copies.choice.new_full((self.rows,), -1)
        return moved.index_copy_(0, self.place, copies.choice)

    @functools.cached_property
    def blocks(self):
        """The map of blocks of 128 rows (`ops_triton.grouped_gemm.BlockMap`), for an `align` of 128."""
        from .ops_triton.grouped_gemm import BLOCK, block_map

        assert self.align == BLOCK
        return block_map(self.groups.counts, self.rows // BLOCK)

    def starts(self) -> list[int]:
        """Where each group begins; see `Groups.host`."""
        at, starts = 0, []
        for size in self.groups.host:
            starts.append(at)
            at += -(-size // self.align) * self.align
        return starts
