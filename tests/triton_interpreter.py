"""What tests that run Triton kernels in its interpreter need of it."""

from __future__ import annotations


def let_loops_take_scalars() -> None:
    """The interpreter holds scalars as arrays of one element, which NumPy no longer takes for an index."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
