"""Networks with attention: encoders of text, images and speech, a decoder's prompt, a block of diffusion."""

from __future__ import annotations

import numpy as np

from rlx_bench.workloads.further.layers import FUTURE, Layers, Made, Value
from rlx_bench.workloads.networks import gpt2_model


def _encoder_layer(net: Layers, x: Value, heads: int, inner: int) -> Value:
    """Norms before attention and before the two products."""
    x = net.add(x, net.attention(net.norm(x), heads))
    return net.add(x, net.linear(net.gelu(net.linear(net.norm(x), inner)), x.shape[-1]))


def vit(size: int = 224, patch: int = 16, width: int = 768, heads: int = 12, layers: int = 12) -> Made:
    """ViT-B/16."""
    net = Layers("vit")
    patches = net.conv(net.noise("x", 1, 3, size, size), width, patch, patch, pad=0, gain=1.0)
    count = patches.shape[2] * patches.shape[3]
    x = net.transpose(net.reshape(patches, 1, width, count), 0, 2, 1)
    x = net.concat(1, net.weight(1, 1, width), x)
    x = net.add(x, net.weight(1, count + 1, width, scale=0.2))
    for _ in range(layers):
        x = _encoder_layer(net, x, heads, 4 * width)
    first = net.reshape(net.slice(net.norm(x), 1, 0, 1), 1, width)
    return net.made(y=net.linear(first, 1000))


def bert(
    length: int = 512, width: int = 768, heads: int = 12, layers: int = 12, vocabulary: int = 30522
) -> Made:
    """BERT-base with a mask; norms follow what they norm."""
    net = Layers("bert")
    tokens = net.tokens("input_ids", length, vocabulary)
    seen = np.ones((1, length), np.float32)
    seen[:, -length // 8 :] = 0
    given = net.input("attention_mask", seen)
    away = net.map("Sub", net.number(1.0), net.reshape(given, 1, 1, 1, length))
    mask = net.mul(away, net.number(FUTURE))
    x = net.add(net.embed(tokens, vocabulary, width), net.weight(1, length, width, scale=0.2))
    x = net.norm(x, 1e-12)
    for _ in range(layers):
        x = net.norm(net.add(x, net.attention(x, heads, mask=mask)), 1e-12)
        inner = net.linear(net.gelu(net.linear(x, 4 * width)), width)
        x = net.norm(net.add(x, inner), 1e-12)
    first = net.reshape(net.slice(x, 1, 0, 1), 1, width)
    return net.made(y=x, pooled=net.map("Tanh", net.linear(first, width)))


def whisper_encoder(
    frames: int = 3000, width: int = 384, heads: int = 6, layers: int = 4, bands: int = 80
) -> Made:
    """Whisper-tiny's encoder on the mel bands of 30 s."""
    net = Layers("whisper_encoder")
    x = net.gelu(net.conv(net.noise("mel", 1, bands, frames), width, 3))
    x = net.gelu(net.conv(x, width, 3, 2))
    x = net.transpose(x, 0, 2, 1)
    x = net.add(x, net.weight(x.shape[1], width, scale=0.2))
    for _ in range(layers):
        x = _encoder_layer(net, x, heads, 4 * width)
    return net.made(y=net.norm(x))


def wav2vec2(
    samples: int = 32000, width: int = 768, heads: int = 12, layers: int = 12, filters: int = 512
) -> Made:
    """wav2vec 2.0 base on two seconds: samples to the scores of letters."""
    net = Layers("wav2vec2")
    x = net.noise("samples", 1, 1, samples)
    for i, (kernel, stride) in enumerate(((10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2))):
        x = net.conv(x, filters, kernel, stride, pad=0)
        x = net.gelu(net.group_norm(x, filters) if i == 0 else x)
    x = net.linear(net.norm(net.transpose(x, 0, 2, 1)), width)
    length, groups = x.shape[1], 16
    near = net.conv(net.transpose(x, 0, 2, 1), width, 128, groups=groups, pad=64)
    near = net.gelu(net.slice(near, 2, 0, length))  # an even window gives one step too many
    x = net.norm(net.add(x, net.transpose(near, 0, 2, 1)))
    for _ in range(layers):
        x = net.norm(net.add(x, net.attention(x, heads)))
        x = net.norm(net.add(x, net.linear(net.gelu(net.linear(x, 4 * width)), width)))
    return net.made(y=net.linear(x, 32))


def _buckets(length: int, buckets: int = 32, farthest: int = 128) -> np.ndarray:
    """T5's buckets of distances: half for each direction, the far half of them logarithmic."""
    distance = np.arange(length)[None] - np.arange(length)[:, None]
    half, near = buckets // 2, buckets // 4
    far = np.maximum(np.abs(distance), 1)
    steps = near + (np.log(far / near) / np.log(farthest / near) * (half - near)).astype(np.int64)
    inside = np.where(np.abs(distance) < near, np.abs(distance), np.minimum(steps, half - 1))
    found: np.ndarray = inside + half * (distance > 0)
    return found


def t5_encoder(
    length: int = 128, width: int = 512, heads: int = 8, layers: int = 6, vocabulary: int = 32128
) -> Made:
    """T5-small's encoder: positions are a bias of the scores, which are not scaled."""
    net = Layers("t5_encoder")
    x = net.embed(net.tokens("input_ids", length, vocabulary), vocabulary, width)
    table = net.weight(32, heads, scale=0.5)
    bias = net.op("Gather", table, net.constant(_buckets(length)), shape=(length, length, heads))
    bias = net.reshape(net.transpose(bias, 2, 0, 1), 1, heads, length, length)
    for _ in range(layers):
        # Weights of queries take the scale's place.
        y = net.mul(net.rms_norm(x), net.number(float(width // heads) ** -0.25))
        x = net.add(x, net.attention(y, heads, mask=bias, bias=False, scaled=False))
        inner = net.relu(net.linear(net.rms_norm(x), 4 * width, bias=False))
        x = net.add(x, net.linear(inner, width, bias=False))
    return net.made(y=net.rms_norm(x))


def _rotated(net: Layers, x: Value, cosine: Value, sine: Value) -> Value:
    """Rotary positions, as Hugging Face's models are exported."""
    half, end = x.shape[-1] // 2, x.shape[-1]
    turned = net.concat(3, net.map("Neg", net.slice(x, 3, half, end)), net.slice(x, 3, 0, half))
    return net.add(net.mul(x, cosine), net.mul(turned, sine))


def _for_all_heads(net: Layers, x: Value, times: int) -> Value:
    """Keys or values of a group of heads, once for every head."""
    batch, groups, length, depth = x.shape
    each = net.reshape(x, batch, groups, 1, length, depth)
    shape = (batch, groups, times, length, depth)
    spread = net.op("Expand", each, net.integers(*shape), shape=shape)
    return net.reshape(spread, batch, groups * times, length, depth)


def llama(
    length: int = 256,
    width: int = 768,
    heads: int = 12,
    groups: int = 4,
    layers: int = 12,
    inner: int = 2048,
    vocabulary: int = 32000,
) -> Made:
    """A Llama of 100M weights: a prompt to the scores of the next token, keys and values kept."""
    net = Layers("llama")
    depth = width // heads
    x = net.embed(net.tokens("ids", length, vocabulary), vocabulary, width)
    angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, depth, 2) / depth)
    angles = np.concatenate([angles, angles], -1)[None, None]
    turn = [net.constant(part.astype(np.float32)) for part in (np.cos(angles), np.sin(angles))]
    mask = net.constant(np.triu(np.full((1, 1, length, length), FUTURE, np.float32), 1))
    kept = dict[str, Value]()
    for layer in range(layers):
        y = net.rms_norm(x)
        q, k, v = (
            net.heads(net.linear(y, count * depth, bias=False), count) for count in (heads, groups, groups)
        )
        q, k = (_rotated(net, part, *turn) for part in (q, k))
        kept |= {f"key_{layer}": k, f"value_{layer}": v}
        k, v = (_for_all_heads(net, part, heads // groups) for part in (k, v))
        x = net.add(x, net.linear(net.joined(net.attend(q, k, v, mask)), width, bias=False))
        y = net.rms_norm(x)
        gated = net.mul(net.silu(net.linear(y, inner, bias=False)), net.linear(y, inner, bias=False))
        x = net.add(x, net.linear(gated, width, bias=False))
    last = net.rms_norm(net.slice(x, 1, length - 1, length))
    return net.made(logits=net.linear(last, vocabulary, bias=False), **kept)


def unet_block(
    size: int = 64, channels: int = 320, heads: int = 8, groups: int = 32, text: int = 77, context: int = 768
) -> Made:
    """One block of Stable Diffusion's UNet: convolutions, attention of all pixels, attention to a text."""
    net = Layers("unet_block")
    image = net.noise("image", 1, channels, size, size)
    words = net.noise("text", 1, text, context)
    when = net.noise("time", 1, 4 * channels)
    x = net.conv(net.silu(net.group_norm(image, groups)), channels, 3)
    step = net.linear(net.silu(when), channels)
    x = net.add(x, net.reshape(step, 1, channels, 1, 1))
    x = net.conv(net.silu(net.group_norm(x, groups)), channels, 3, gain=0.5)
    image = net.add(image, x)
    x = net.conv(net.group_norm(image, groups), channels, 1, gain=1.0)
    x = net.reshape(net.transpose(x, 0, 2, 3, 1), 1, size * size, channels)
    x = net.add(x, net.attention(net.norm(x), heads))
    x = net.add(x, _to_text(net, net.norm(x), words, heads))
    wide = net.linear(net.norm(x), 8 * channels)
    value, gate = (net.slice(wide, 2, i * 4 * channels, (i + 1) * 4 * channels) for i in (0, 1))
    x = net.add(x, net.linear(net.mul(value, net.gelu(gate)), channels))
    x = net.transpose(net.reshape(x, 1, size, size, channels), 0, 3, 1, 2)
    return net.made(y=net.add(net.conv(x, channels, 1, gain=1.0), image))


def _to_text(net: Layers, x: Value, words: Value, heads: int) -> Value:
    width = x.shape[-1]
    q, k, v = (net.heads(net.linear(of, width, bias=False), heads) for of in (x, words, words))
    return net.linear(net.joined(net.attend(q, k, v)), width)


def gpt2(length: int = 128, layers: int = 12, vocabulary: int = 50257) -> Made:
    """The prompt of a GPT-2 of 124M weights."""
    generator = np.random.default_rng(0)
    feed = {"ids": generator.integers(0, vocabulary, (1, length)), "position": np.arange(length)[None]}
    model = gpt2_model(length, 0, layers, vocabulary)
    return Made(model, feed, 2.0 * (7.1e6 * layers * length + 768.0 * vocabulary))
