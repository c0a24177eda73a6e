"""Every op, declared once. Public functions follow NumPy's names and keywords.

On nodes they add to the graph; on NumPy arrays alone they evaluate at once by the reference.

>>> import numpy as np
>>> exp(np.array([0.0, 1.0]))
array([1.        , 2.71828183])
"""

from __future__ import annotations

from rlx.ops import conv_packing, packing, region, structural
from rlx.ops.activation import (
    cbrt,
    celu,
    clip,
    elu,
    gelu,
    hard_sigmoid,
    hard_swish,
    hard_tanh,
    hypot,
    is_finite,
    leaky_relu,
    log_sigmoid,
    logaddexp,
    mish,
    prelu,
    reciprocal,
    relu,
    selu,
    shrink,
    silu,
    softplus,
    softsign,
    square,
    swish,
    thresholded_relu,
)
from rlx.ops.attention import attention, rope, rope_tables
from rlx.ops.choice import sample_tokens
from rlx.ops.complex import conj, imag, make_complex, real
from rlx.ops.contract import dot_general, einsum, matmul
from rlx.ops.control import cond
from rlx.ops.conv import conv
from rlx.ops.conv_transpose import conv_transpose
from rlx.ops.deform_conv import deform_conv
from rlx.ops.create import (
    arange,
    eye,
    full,
    full_like,
    iota,
    linspace,
    ones,
    ones_like,
    zeros,
    zeros_like,
)
from rlx.ops.custom import custom, register_op, unregister_op
from rlx.ops.cumulative import cummax, cummin, cumprod, cumsum
from rlx.ops.fft import dft, fft, ifft, irfft, rfft
from rlx.ops.grid_sample import affine_grid, grid_sample
from rlx.ops.layout import (
    depth_to_space,
    expand_dims,
    flatten,
    meshgrid,
    moveaxis,
    repeat,
    roll,
    space_to_depth,
    split,
    squeeze,
    stack,
    swapaxes,
    tile,
)
from rlx.ops.masks import diag, diagonal, one_hot, tril, triu
from rlx.ops.dynamic import dynamic_slice, dynamic_update_slice
from rlx.ops.elementwise import (
    abs,
    acos,
    acosh,
    add,
    asin,
    asinh,
    atan,
    atan2,
    atanh,
    bitwise_and,
    bitwise_not,
    bitwise_or,
    bitwise_xor,
    ceil,
    cos,
    cosh,
    div,
    equal,
    erf,
    erfc,
    exp,
    exp2,
    expm1,
    floor,
    floor_div,
    fmod,
    greater,
    greater_equal,
    is_inf,
    is_nan,
    less,
    less_equal,
    log,
    log1p,
    log2,
    log10,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    mod,
    mul,
    neg,
    not_equal,
    pow,
    round,
    rsqrt,
    shift_left,
    shift_right,
    sigmoid,
    sign,
    sin,
    sinh,
    sqrt,
    sub,
    tan,
    tanh,
    trunc,
    trunc_div,
    where,
)
from rlx.ops.elementwise import cast as _cast
from rlx.ops.loop import loop, while_loop
from rlx.ops.loss import cross_entropy, nll_loss
from rlx.ops.nn import dropout, embedding, linear, log_softmax, softmax, swiglu
from rlx.ops.gather import gather, gather_elements, gather_nd, take, take_along_axis
from rlx.ops.norm import batch_norm, group_norm, instance_norm, layer_norm, lrn, rms_norm
from rlx.ops.pool import (
    avg_pool,
    global_avg_pool,
    global_lp_pool,
    global_max_pool,
    lp_pool,
    max_pool,
    max_unpool,
)
from rlx.ops.padding import pad
from rlx.ops.qlinear import matmul_integer, qlinear_matmul
from rlx.ops.qlinear_conv import conv_integer, qlinear_conv
from rlx.ops.quant import dequantize, dynamic_quantize, fake_quantize, quantize
from rlx.ops.random import (
    bernoulli,
    dropout_mask,
    normal,
    randint,
    random_bits,
    random_fold,
    random_key,
    random_split,
    uniform,
)
from rlx.ops.recurrent import gru, lstm, rnn
from rlx.ops.reduce import all, any, argmax, argmin, max, min, prod, sum
from rlx.ops.resize import resize, upsample
from rlx.ops.roi_align import roi_align
from rlx.ops.scan import scan
from rlx.ops.scatter import scatter, scatter_elements, scatter_nd
from rlx.ops.window import fold_windows, window_reduce, windows
from rlx.ops.selection import argwhere, compress, nonzero, unique
from rlx.ops.shape import broadcast_to, concat, flip, reshape, slice_axis, transpose
from rlx.ops.signal import istft, stft, stft_pairs
from rlx.ops.signal_mel import log_mel, log_mel_backward, mel_filter_bank, mel_weight_matrix
from rlx.ops.signal_welch import spectral_peaks, welch, welch_peaks
from rlx.ops.signal_window import blackman_window, get_window, hamming_window, hann_window, kaiser_window
from rlx.ops.sorting import argsort, searchsorted, sort, top_k
from rlx.ops.stats import dim_value, log_sum, logsumexp, mean, norm_l1, norm_l2, std, sum_square, var
from rlx.ir.op import all_ops


def cast(x: object, dtype: object, saturate: bool | None = None) -> object:
    """Convert to another dtype; see the `cast` op for the rounding and saturation rules.

    >>> import numpy as np
    >>> cast(np.array([1.9, -1.9]), "i32")
    array([ 1, -1], dtype=int32)
    """
    return _cast(x, dtype=dtype, saturate=saturate)


__all__ = [name for name in dir() if not name.startswith("_") and name not in ("annotations", "region", "structural")]
