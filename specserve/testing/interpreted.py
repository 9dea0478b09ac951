"""Triton kernels on a machine without a GPU: Triton's own interpreter runs them in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np


def mend_interpreter() -> None:
    """Let kernels use numbers as loop bounds: Triton 3.6 asks NumPy for int() of an array of one, which NumPy 2.4
    refuses. Let a truth value stay one where it is repeated, as masks are: Triton 3.9 makes integers of it. And let the
    products of a row not depend on how many there are: NumPy's of float32 are added up as their number and the machine
    have it; of float64, rounded once, that is not seen. Only where Triton was imported with TRITON_INTERPRET=1."""
    import triton
    from triton.runtime import interpreter

    assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1 before triton is imported"
    plain = interpreter._patch_lang_tensor
    if getattr(plain, "is_mended", False):
        return

    def patch(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    splat = interpreter.InterpreterBuilder.create_splat

    def create_splat(self: Any, *args: Any) -> Any:
        found, given = splat(self, *args), args[-1]
        if given.data.dtype == bool:
            found.data = found.data.astype(bool)
        return found

    dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        if a.data.dtype != np.float32 or d.data.dtype != np.float32:
            return dot(self, a, b, d, *how)
        products = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(products + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_splat = create_splat
    interpreter.InterpreterBuilder.create_dot = create_dot
    patch.is_mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch
