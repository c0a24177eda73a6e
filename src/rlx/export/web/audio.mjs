// WAV files as samples from -1 to 1, and other rates.

const READERS = {
  "1 8": [1, (view, at) => (view.getUint8(at) - 128) / 128],
  "1 16": [2, (view, at) => view.getInt16(at, true) / 32768],
  "1 24": [3, (view, at) => (view.getUint8(at) | (view.getInt16(at + 1, true) << 8)) / 8388608],
  "1 32": [4, (view, at) => view.getInt32(at, true) / 2147483648],
  "3 32": [4, (view, at) => view.getFloat32(at, true)],
};

/** {rate, samples} of the bytes of a WAV file; channels are averaged. */
export function readWav(buffer) {
  const view = new DataView(buffer);
  const name = (at) => String.fromCharCode(...new Uint8Array(buffer, at, 4));
  if (buffer.byteLength < 12 || name(0) !== "RIFF" || name(8) !== "WAVE") throw new TypeError("this is not a WAV file");
  let format = null;
  for (let at = 12; at + 8 <= buffer.byteLength; ) {
    const kind = name(at), size = Math.min(view.getUint32(at + 4, true), buffer.byteLength - at - 8), body = at + 8;
    if (kind === "fmt " && size >= 16) {
      const tag = view.getUint16(body, true), extended = tag === 0xfffe && size >= 26;
      format = { tag: extended ? view.getUint16(body + 24, true) : tag, channels: view.getUint16(body + 2, true), rate: view.getUint32(body + 4, true), bits: view.getUint16(body + 14, true) };
    } else if (kind === "data" && format !== null) {
      return { rate: format.rate, samples: samplesOf(view, body, size, format) };
    }
    at = body + size + (size % 2);
  }
  throw new TypeError("this WAV file has no sound");
}

function samplesOf(view, start, size, { tag, channels, rate, bits }) {
  const reader = READERS[`${tag} ${bits}`];
  if (reader === undefined || channels === 0 || rate === 0) throw new TypeError(`WAV files with ${bits} bits of kind ${tag} are not supported`);
  const [width, read] = reader, frame = width * channels;
  return Float32Array.from({ length: Math.floor(size / frame) }, (_, i) => {
    let sum = 0;
    for (let channel = 0; channel < channels; channel++) sum += read(view, start + i * frame + channel * width);
    return sum / channels;
  });
}

/** Samples at another rate: means where there are to be fewer, else lines between neighbours. */
export function resampled(samples, from, to) {
  if (from === to) return samples;
  const step = from / to;
  return Float32Array.from({ length: Math.floor(samples.length / step) }, (_, i) => {
    const at = i * step;
    if (step <= 1) {
      const low = Math.floor(at), high = Math.min(low + 1, samples.length - 1);
      return samples[low] + (samples[high] - samples[low]) * (at - low);
    }
    const part = samples.subarray(Math.floor(at), Math.max(Math.floor(at) + 1, Math.floor(at + step)));
    return part.reduce((a, b) => a + b, 0) / part.length;
  });
}
