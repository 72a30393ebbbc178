"""Convolutions: all trials have one together, in which every trial is a group of channels.

The output lies as [examples, trials, channels, ...], a view of [examples, trials × channels, ...], so that the next
convolution, normalization or pooling takes it as it is. On a GPU it is in channels-last order, where grouped
convolutions take half the time; two kinds of convolution that cuDNN is slow at are then computed as products.
Trials never share a sum, not even one with zero weights: 0 × NaN would carry one trial's divergence into another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.functional import pad

from penstock.training.fused.operators.channelwise import into_batch, into_channels, out_of_batch, out_of_channels
from penstock.training.fused.operators.normalized import Normalized, inside, outside
from penstock.training.fused.stacked import Stacked, name_of, rule
from penstock.training.kernels.choice import wanted


@rule("conv1d", "conv2d", "conv3d")
def convolve(
    func: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Stacked:
    return _convolve(func, input, weight, bias, groups, {"stride": stride, "padding": padding, "dilation": dilation})


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolve_transposed(
    func: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Stacked:
    options = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
    return _convolve(func, input, weight, bias, groups, options)


def _convolve(func: Any, x: Any, weight: Any, bias: Any, groups: int, options: dict[str, Any]) -> Stacked:
    if x.ndim == weight.ndim - 1:
        one = Stacked(x.moved(0).unsqueeze(1), 0) if isinstance(x, Stacked) else x.unsqueeze(0)
        made = _convolve(func, one, weight, bias, groups, options)
        return Stacked(made.whole.squeeze(1 - made.at), 0)
    if not isinstance(weight, Stacked):
        return _shared_weight(func, x, weight, bias, groups, options)
    if (own := _by_kernel(name_of(func), x, weight, bias, groups, options)) is not None:
        return own
    trials = weight.trials
    if bias is not None:
        bias = bias.moved(0).flatten() if isinstance(bias, Stacked) else bias.repeat(trials)
    if not isinstance(x, Stacked) and groups == 1:  # nothing is copied: the trials are outputs of one convolution
        outputs = int("transpose" in name_of(func))
        flat = weight.moved(outputs).flatten(outputs, outputs + 1)
        return out_of_channels(func(_laid_out(x), flat, bias, **options), trials)
    if not isinstance(x, Stacked):
        x = Stacked(x.unsqueeze(1).expand(-1, trials, *x.shape[1:]), 1)
    folded = into_channels(x, _channels_last(x))
    if name_of(func) == "conv2d" and groups == 1 and _rewrites(folded):
        stride, padding, dilation = (_pair(value) for value in options.values())
        if weight.shape[2:] == (1, 1) and padding in ((0, 0), "valid"):
            return out_of_channels(_product(folded[:, :, :: stride[0], :: stride[1]], weight, bias), trials)
        geometry = (tuple(weight.shape[2:]), stride, padding, dilation)
        if geometry == ((3, 3), (2, 2), (1, 1), (1, 1)) and not any(size % 2 for size in folded.shape[2:]):
            return out_of_channels(_halving(folded, weight, bias), trials)
    made = func(folded, weight.moved(0).flatten(0, 1), bias, **options, groups=trials * groups)
    return out_of_channels(made, trials)


def _by_kernel(name: str, x: Any, weight: Stacked, bias: Any, groups: int, options: dict[str, Any]) -> Stacked | None:
    """A convolution by Penstock's own kernels, where they are wanted and there is one."""
    single = groups == x.shape[1] == weight.shape[0] and groups > 1  # every channel has a filter of its own
    if name != "conv2d" or not (groups == 1 or single) or not wanted(weight) or isinstance(options["padding"], str):
        return None
    from penstock.training.kernels.depthwise import depthwise
    from penstock.training.kernels.geometry import Geometry
    from penstock.training.kernels.weighing import convolution

    mixed = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if mixed else x.dtype
    stride, padding, dilation = (_pair(value) for value in options.values())
    (examples, channels, *size), (made, _, *taps) = x.shape, weight.shape
    geometry = Geometry.of(_pair(size), _pair(taps), stride, padding, dilation)
    if not wanted(weight, geometry.numbers(examples, channels, made)):
        return None  # too many numbers for the kernels
    weights = weight.moved(0).to(dtype) if mixed and single else weight.moved(0)  # other kernels cast by themselves
    convolved = None
    if isinstance(x, Normalized) and x.dtype == dtype and not single:
        convolved = x.convolved(weights, geometry)
    if convolved is None:
        own = inside(x) if isinstance(x, Stacked) else x.permute(0, 2, 3, 1).unsqueeze(0)
        images = own.to(dtype)
        if single:
            convolved = depthwise(images.expand(len(weights), *images.shape[1:]), weights.flatten(2).mT, geometry)
        else:
            convolved, again = convolution(images, weights, geometry)
            tracked = images.requires_grad and torch.is_grad_enabled()
            if isinstance(x, Stacked) and x.at == 0 and images is own and tracked:
                x.hold(outside(again))  # the next reader of x gets the copy: the kernel adds up both gradients
    if bias is not None:
        each = bias.moved(0).unsqueeze(1) if isinstance(bias, Stacked) else bias
        convolved = convolved + each.to(convolved.dtype).reshape(-1, 1, 1, 1, convolved.shape[-1])
    return Stacked(outside(convolved), 0)


def _shared_weight(func: Any, x: Any, weight: Any, bias: Any, groups: int, options: dict[str, Any]) -> Stacked:
    """The trials are examples; where only the bias is a trial's own, they share everything but its addition."""
    common = None if isinstance(bias, Stacked) else bias
    if isinstance(x, Stacked):
        made = out_of_batch(func(_laid_out(into_batch(x)), weight, common, **options, groups=groups), x)
    else:
        made = Stacked(func(_laid_out(x), weight, None, **options, groups=groups).unsqueeze(1), 1)
    if not isinstance(bias, Stacked):
        return made
    own = bias.moved(0).to(made.dtype)
    return Stacked(made.whole + own.reshape(len(own), *[1] * (1 - made.at), -1, *[1] * (weight.ndim - 2)), made.at)


def _channels_last(x: torch.Tensor) -> bool:
    """Whether the order that cuDNN's grouped kernels want is worth a copy. They have no kernels for float64."""
    return x.is_cuda and x.ndim == 4 and x.dtype != torch.float64


def _laid_out(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last) if _channels_last(x) else x


def _rewrites(x: torch.Tensor) -> bool:
    """Whether the rewrites beat cuDNN, which transposes strided images and launches a kernel for each group."""
    return x.is_cuda


def _pair(value: Any) -> Any:
    if isinstance(value, str):
        return value
    pair = (value, value) if isinstance(value, int) else tuple(value)
    return pair * 2 if len(pair) == 1 else pair


class _ProductInOrder(torch.autograd.Function):
    """[n, trials, inputs] × [trials, inputs, outputs] → [n, trials, outputs]; the product writes in that order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        made = x.new_empty(*x.shape[:2], weight.shape[2])
        torch.bmm(x.transpose(0, 1), weight, out=made.transpose(0, 1))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        return (
            _ProductInOrder.apply(grads[0], weight.mT) if of_x else None,  # type: ignore[no-untyped-call]
            torch.bmm(x.permute(1, 2, 0), grads[0].transpose(0, 1)) if of_weight else None,
        )


def _product(x: torch.Tensor, weight: Stacked, bias: torch.Tensor | None) -> torch.Tensor:
    """Rewrite 1: a 1×1 convolution is a matrix product of each trial's channels at every place."""
    places = torch.unflatten(x.permute(0, 2, 3, 1), 3, (weight.trials, -1))
    return _at_places(places, weight.moved(0).flatten(2).mT, bias)


def _halving(x: torch.Tensor, weight: Stacked, bias: torch.Tensor | None) -> torch.Tensor:
    """Rewrite 2: a padded 3×3 convolution of stride 2 is a product of the channels at nine places."""
    height, width = x.shape[2:]
    images = torch.unflatten(x.permute(0, 2, 3, 1), 3, (weight.trials, -1))
    padded = pad(images, (0, 0, 0, 0, 1, 0, 1, 0))  # in an even image, no place reads the padding at the far edges
    taps = [padded[:, i : i + height : 2, j : j + width : 2] for i in range(3) for j in range(3)]
    return _at_places(torch.cat(taps, -1), weight.moved(0).permute(0, 3, 4, 2, 1).flatten(1, 3), bias)


def _at_places(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[batch, height, width, trials, inputs] × [trials, inputs, outputs], as channels-last images of all trials."""
    rows = x.flatten(0, 2)
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        # Autocast does not cast a product that is told where to write.
        rows, weight = (v.to(torch.get_autocast_dtype(x.device.type)) for v in (rows, weight))
    made: torch.Tensor
    if get_proxy_mode() is None:
        made = _ProductInOrder.apply(rows, weight)  # type: ignore[no-untyped-call]
    else:  # a compiler chooses for itself where a product is written
        made = torch.bmm(rows.transpose(0, 1), weight).transpose(0, 1).contiguous()
    made = torch.unflatten(made.flatten(1), 0, x.shape[:3]).permute(0, 3, 1, 2)
    return made if bias is None else made + bias.to(made.dtype).reshape(-1, 1, 1)
