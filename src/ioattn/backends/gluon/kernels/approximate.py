"""The machine's own reciprocal and logarithm, each one instruction where the exact function is ten or more.

What they are used for has 16 bits, or, as the LSE, an absolute error of a few 1e-7 from its sums already.
"""

from ioattn.backends.gluon.kernels.names import gl, gluon


@gluon.jit
def reciprocal(x):
    """1 / x within an ulp, where neither is subnormal; of 0 and infinity as by division."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2(x):
    """The logarithm: absolute error 2**-22 for x in (0.5, 2), relative error 2**-22 elsewhere."""
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def tanh(x):
    """Hyperbolic tangent with an error of about 1e-7, also near 0, where it cancels; infinities give 1 and -1."""
    return 1.0 - 2.0 * reciprocal(1.0 + gl.exp2(x * 2.8853900817779268))
