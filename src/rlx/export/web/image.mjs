// What a model says of an image: the probability of each class.

import { element, find, guarded, settings, start } from "./page.mjs";

/** The next whole number; of two that are as near, the even one. */
function rounded(value) {
  const low = Math.floor(value), rest = value - low;
  return rest < 0.5 || (rest === 0.5 && low % 2 === 0) ? low : low + 1;
}

/** Bilinear, pixel centres aligned, rounded: {width, height, data} of RGBA bytes at another size. */
export function resized({ width, height, data }, toWidth, toHeight) {
  const taps = (size, to) => Array.from({ length: to }, (_, i) => {
    const at = Math.min(Math.max(((i + 0.5) * size) / to - 0.5, 0), size - 1), low = Math.floor(at);
    return [low, Math.min(low + 1, size - 1), at - low];
  });
  const rows = taps(height, toHeight), columns = taps(width, toWidth), made = new Float32Array(toWidth * toHeight * 4);
  rows.forEach(([top, bottom, down], y) => columns.forEach(([left, right, across], x) => {
    for (let c = 0; c < 4; c++) {
      const at = (row, column) => data[4 * (row * width + column) + c];
      const before = at(top, left) * (1 - down) + at(bottom, left) * down;
      const after = at(top, right) * (1 - down) + at(bottom, right) * down;
      made[4 * (y * toWidth + x) + c] = rounded(before * (1 - across) + after * across);
    }
  }));
  return { width: toWidth, height: toHeight, data: made };
}

/** An image as planes of numbers, at its own proportions; what it does not fill is 0. */
export function planes(image, { width, height, mean, deviation, order }) {
  const wide = Math.min(width, Math.max(1, Math.ceil((height * image.width) / image.height)));
  const { data } = resized(image, wide, height);
  const made = new Float32Array(3 * height * width);
  for (const [plane, channel] of order.entries()) {
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < wide; x++) {
        made[(plane * height + y) * width + x] = (data[4 * (y * wide + x) + channel] / 255 - mean) / deviation;
      }
    }
  }
  return made;
}

await start(async (model) => {
  const { info } = model, canvas = find("picture"), pen = canvas.getContext("2d", { willReadFrequently: true });
  let bitmap = null, turned = false, asked = 0; // asked: how many images; only the last one's classes are shown

  async function classify() {
    const mine = ++asked;
    find("time").textContent = "";
    canvas.width = bitmap.width;
    canvas.height = bitmap.height;
    pen.fillStyle = "white";
    pen.fillRect(0, 0, canvas.width, canvas.height);
    if (turned) pen.setTransform(-1, 0, 0, -1, canvas.width, canvas.height);
    pen.drawImage(bitmap, 0, 0);
    canvas.hidden = find("turn").hidden = false;
    const input = planes(pen.getImageData(0, 0, canvas.width, canvas.height), settings.image);
    const { outputs, milliseconds } = await model.run({ [info.inputs[0].name]: input }, settings.sizes);
    if (mine !== asked) return;
    const scores = Array.from(outputs[info.outputs[0].name]);
    const ranked = scores.map((score, i) => ({ score, label: settings.labels[i] ?? String(i) })).sort((a, b) => b.score - a.score);
    find("results").replaceChildren(...ranked.map(({ score, label }) => {
      const top = element("div", { className: "row apart" }, element("span", { className: "text" }, label), element("code", {}, score.toFixed(4)));
      return element("li", {}, top, element("progress", { className: "bar", max: 1, value: score, ariaHidden: "true" }));
    }));
    find("time").textContent = `${milliseconds.toFixed(1)} ms`;
  }

  find("file").onchange = guarded(async () => {
    const [file] = find("file").files;
    if (file === undefined) return;
    const mine = ++asked;
    find("time").textContent = "";
    let chosen;
    try {
      chosen = await createImageBitmap(file, { colorSpaceConversion: "none" });
    } catch {
      throw new TypeError(`${file.name} is not an image that this browser can show`);
    }
    if (mine !== asked) return;
    [bitmap, turned] = [chosen, false];
    await classify();
  });
  find("turn").onclick = guarded(async () => {
    turned = !turned;
    await classify();
  });
});
