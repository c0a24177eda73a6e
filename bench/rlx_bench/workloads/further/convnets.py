"""Networks of convolutions: classifiers, a detector, segmentation, video."""

from __future__ import annotations

import numpy as np

from rlx_bench.workloads.further.layers import Layers, Made, Value


def _squeezed(net: Layers, x: Value, inside: int, hard: bool) -> Value:
    """Channels weighted by what a small network makes of their means."""
    s = net.conv(net.pooled(x), inside, 1)
    s = net.conv(net.relu(s) if hard else net.silu(s), x.shape[1], 1)
    gate = net.map("HardSigmoid", s, alpha=1 / 6, beta=0.5) if hard else net.sigmoid(s)
    return net.mul(x, gate)


def _eighth(value: float) -> int:
    """A number of channels: a multiple of 8.

    >>> _eighth(17), _eighth(3)
    (16, 8)
    """
    return max(8, int(value + 4) // 8 * 8)


def _classified(net: Layers, x: Value, classes: int) -> Made:
    return net.made(y=net.linear(x, classes))


MOBILE_V3 = (  # kernel, width inside, channels, squeeze, hard swish, stride
    (3, 16, 16, 0, 0, 1),
    (3, 64, 24, 0, 0, 2),
    (3, 72, 24, 0, 0, 1),
    (5, 72, 40, 1, 0, 2),
    (5, 120, 40, 1, 0, 1),
    (5, 120, 40, 1, 0, 1),
    (3, 240, 80, 0, 1, 2),
    (3, 200, 80, 0, 1, 1),
    (3, 184, 80, 0, 1, 1),
    (3, 184, 80, 0, 1, 1),
    (3, 480, 112, 1, 1, 1),
    (3, 672, 112, 1, 1, 1),
    (5, 672, 160, 1, 1, 2),
    (5, 960, 160, 1, 1, 1),
    (5, 960, 160, 1, 1, 1),
)


def mobilenet_v3(size: int = 224, width: float = 1.0, blocks: int = 15, classes: int = 1000) -> Made:
    """MobileNetV3 Large."""
    net = Layers("mobilenet_v3")
    x = net.hard_swish(net.conv(net.noise("x", 1, 3, size, size), _eighth(16 * width), 3, 2))
    for kernel, inside, channels, squeeze, hard, stride in MOBILE_V3[:blocks]:
        activate = net.hard_swish if hard else net.relu
        wide = _eighth(inside * width)
        y = activate(net.conv(x, wide, 1)) if wide != x.shape[1] else x
        y = activate(net.conv(y, wide, kernel, stride, groups=wide))
        y = _squeezed(net, y, _eighth(wide / 4), hard=True) if squeeze else y
        y = net.conv(y, _eighth(channels * width), 1, gain=1.0)
        x = net.add(x, y) if x.shape == y.shape else y
    x = net.hard_swish(net.conv(x, _eighth(960 * width), 1))
    x = net.hard_swish(net.linear(net.flat(net.pooled(x)), _eighth(1280 * width)))
    return _classified(net, x, classes)


EFFICIENT_B0 = (  # expansion, channels, blocks, kernel, stride
    (1, 16, 1, 3, 1),
    (6, 24, 2, 3, 2),
    (6, 40, 2, 5, 2),
    (6, 80, 3, 3, 2),
    (6, 112, 3, 5, 1),
    (6, 192, 4, 5, 2),
    (6, 320, 1, 3, 1),
)


def efficientnet_b0(size: int = 224, width: float = 1.0, stages: int = 7, classes: int = 1000) -> Made:
    net = Layers("efficientnet_b0")
    x = net.silu(net.conv(net.noise("x", 1, 3, size, size), _eighth(32 * width), 3, 2))
    for expansion, channels, depth, kernel, stride in EFFICIENT_B0[:stages]:
        for block in range(depth):
            before = x.shape[1]
            y = net.silu(net.conv(x, before * expansion, 1)) if expansion > 1 else x
            y = net.silu(net.conv(y, y.shape[1], kernel, stride if block == 0 else 1, groups=y.shape[1]))
            y = _squeezed(net, y, max(before // 4, 1), hard=False)
            y = net.conv(y, _eighth(channels * width), 1, gain=1.0)
            x = net.add(x, y) if x.shape == y.shape else y
    x = net.silu(net.conv(x, _eighth(1280 * width), 1))
    return _classified(net, net.flat(net.pooled(x)), classes)


def convnext(
    size: int = 224,
    depths: tuple[int, ...] = (3, 3, 9, 3),
    width: int = 96,
    classes: int = 1000,
) -> Made:
    """ConvNeXt-T: depthwise 7x7, then a layer norm and two products with the channels last."""
    net = Layers("convnext")
    x = net.channel_norm(net.conv(net.noise("x", 1, 3, size, size), width, 4, 4, pad=0))
    for stage, depth in enumerate(depths):
        if stage:
            x = net.conv(net.channel_norm(x), 2 * x.shape[1], 2, 2, pad=0)
        for _ in range(depth):
            channels = x.shape[1]
            y = net.transpose(net.conv(x, channels, 7, groups=channels), 0, 2, 3, 1)
            y = net.linear(net.gelu(net.linear(net.norm(y, 1e-6), 4 * channels)), channels)
            y = net.mul(net.weight(channels, scale=0.1, around=0.5), y)
            x = net.add(x, net.transpose(y, 0, 3, 1, 2))
    return _classified(net, net.norm(net.flat(net.pooled(x)), 1e-6), classes)


def vgg16(size: int = 224, width: int = 64, hidden: int = 4096, classes: int = 1000) -> Made:
    net = Layers("vgg16")
    x = net.noise("x", 1, 3, size, size)
    for stage, depth in enumerate((2, 2, 3, 3, 3)):
        for _ in range(depth):
            x = net.relu(net.conv(x, width * min(1 << stage, 8), 3))
        x = net.max_pool(x, 2, 2)
    x = net.flat(x)
    for _ in range(2):
        x = net.relu(net.linear(x, hidden))
    return _classified(net, x, classes)


def unet(size: int = 256, width: int = 32, levels: int = 4) -> Made:
    """Segmentation: down and up again, each level beside its twin."""
    net = Layers("unet")

    def block(x: Value, channels: int) -> Value:
        return net.relu(net.conv(net.relu(net.conv(x, channels, 3)), channels, 3))

    x, kept = net.noise("x", 1, 3, size, size), []
    for level in range(levels):
        x = block(x, width << level)
        kept.append(x)
        x = net.max_pool(x, 2, 2)
    x = block(x, width << levels)
    for level in reversed(range(levels)):
        channels, before = width << level, x.shape[1]
        weight = net.weight(before, channels, 2, 2, scale=before**-0.5)
        shape = (1, channels, 2 * x.shape[2], 2 * x.shape[3])
        net.count(shape, before)
        bias = net.weight(channels, scale=0.1)
        up = net.op("ConvTranspose", x, weight, bias, shape=shape, kernel_shape=[2, 2], strides=[2, 2])
        x = block(net.concat(1, kept[level], up), channels)
    return net.made(y=net.sigmoid(net.conv(x, 1, 1)))


def c3d(frames: int = 16, size: int = 112, width: int = 64, hidden: int = 4096, classes: int = 487) -> Made:
    """Video: convolutions of 3x3x3, then two wide layers."""
    net = Layers("c3d")
    x = net.noise("x", 1, 3, frames, size, size)
    for stage, depth in enumerate((1, 1, 2, 2, 2)):
        for _ in range(depth):
            x = net.relu(net.conv(x, width * min(1 << stage, 8), 3))
        window = (1, 2, 2) if stage == 0 else (2, 2, 2)
        x = net.max_pool(x, window, window, (0, 1, 1) if stage == 4 else 0)
    x = net.flat(x)
    for _ in range(2):
        x = net.relu(net.linear(x, hidden))
    return net.made(y=net.softmax(net.linear(x, classes)))


class _Detector(Layers):
    """Blocks of YOLOv8."""

    def block(self, x: Value, channels: int, kernel: int = 1, stride: int = 1) -> Value:
        return self.silu(self.conv(x, channels, kernel, stride))

    def split_block(self, x: Value, channels: int, depth: int, shortcut: bool) -> Value:
        """Half of the channels goes on through bottlenecks, and every step is kept."""
        x, half = self.block(x, channels), channels // 2
        parts = [self.slice(x, 1, 0, half), self.slice(x, 1, half, channels)]
        for _ in range(depth):
            y = self.block(self.block(parts[-1], half, 3), half, 3)
            parts.append(self.add(parts[-1], y) if shortcut else y)
        return self.block(self.concat(1, *parts), channels)

    def pyramid(self, x: Value) -> Value:
        """Maxima over windows of 5, 9 and 13."""
        channels = x.shape[1]
        parts = [self.block(x, channels // 2)]
        for _ in range(3):
            parts.append(self.max_pool(parts[-1], 5, 1, 2))
        return self.block(self.concat(1, *parts), channels)

    def doubled(self, x: Value) -> Value:
        scales = self.constant(np.array([1, 1, 2, 2], np.float32))
        shape = (*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3])
        return self.op(
            "Resize",
            x,
            None,
            scales,
            shape=shape,
            mode="nearest",
            coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        )

    def head(self, x: Value, width: int, bins: int, classes: int) -> Value:
        """Distances to four sides as histograms, and scores, for every pixel."""
        box, score = max(16, width // 4 * 4, 4 * bins), max(width, min(classes, 100))
        sides = self.conv(self.block(self.block(x, box, 3), box, 3), 4 * bins, 1, gain=1.0)
        scores = self.conv(self.block(self.block(x, score, 3), score, 3), classes, 1, gain=1.0)
        both = self.concat(1, sides, scores)
        return self.reshape(both, 1, both.shape[1], both.shape[2] * both.shape[3])


def yolo(size: int = 640, width: int = 16, classes: int = 80, bins: int = 16) -> Made:
    """A detector like YOLOv8n, from the image to boxes and scores."""
    net = _Detector("yolo")
    w = [width << i for i in range(5)]
    x = net.block(net.noise("x", 1, 3, size, size), w[0], 3, 2)
    kept = []
    for stage, depth in enumerate((1, 2, 2, 1), 1):
        x = net.split_block(net.block(x, w[stage], 3, 2), w[stage], depth, shortcut=True)
        kept.append(x)
    _, p3, p4, _ = kept
    p5 = net.pyramid(x)
    p4 = net.split_block(net.concat(1, net.doubled(p5), p4), w[3], 1, shortcut=False)
    p3 = net.split_block(net.concat(1, net.doubled(p4), p3), w[2], 1, shortcut=False)
    p4 = net.split_block(net.concat(1, net.block(p3, w[2], 3, 2), p4), w[3], 1, shortcut=False)
    p5 = net.split_block(net.concat(1, net.block(p4, w[3], 3, 2), p5), w[4], 1, shortcut=False)
    levels = [net.head(p, w[2], bins, classes) for p in (p3, p4, p5)]
    every = net.concat(2, *levels)
    cells, count = [p.shape[2] for p in (p3, p4, p5)], every.shape[2]
    strides = np.concatenate([np.full(n * n, size / n, np.float32) for n in cells])
    centres = np.concatenate(
        [(np.stack(np.meshgrid(np.arange(n), np.arange(n))).reshape(2, -1) + 0.5) for n in cells], axis=1
    ).astype(np.float32)
    sides = net.reshape(net.slice(every, 1, 0, 4 * bins), 1, 4, bins, count)
    share = net.softmax(net.transpose(sides, 0, 2, 1, 3), axis=1)
    steps = net.constant(np.arange(bins, dtype=np.float32).reshape(1, bins, 1, 1))
    net.count((4, count), bins)
    far = net.reshape(net.op("Conv", share, steps, shape=(1, 1, 4, count), kernel_shape=[1, 1]), 1, 4, count)
    middle = net.constant(centres[None])
    low = net.map("Sub", middle, net.slice(far, 1, 0, 2))
    high = net.add(middle, net.slice(far, 1, 2, 4))
    centre = net.map("Div", net.add(low, high), net.number(2.0))
    boxes = net.mul(net.concat(1, centre, net.map("Sub", high, low)), net.constant(strides[None, None]))
    scores = net.sigmoid(net.slice(every, 1, 4 * bins, 4 * bins + classes))
    return net.made(y=net.concat(1, boxes, scores))
