// Voice activity: the probability of speech, chunk by chunk, of a WAV file or of the microphone.

import { find, guarded, settings, showError, start } from "./page.mjs";
import { readWav, resampled } from "./audio.mjs";
import { toArray } from "./numbers.mjs";

const { rate, chunk, context, threshold } = settings;
const seconds = (i) => ((i * chunk) / rate).toFixed(1);

/** The model as a stream: it gets the end of the chunk before and the state that it gave then. */
class Detector {
  #model; #state; #before;

  constructor(model) {
    this.#model = model;
    this.#before = new Float32Array(context);
    this.#state = null;
  }

  async next(samples) {
    const { info } = this.#model, input = new Float32Array(context + chunk);
    input.set(this.#before);
    input.set(samples, context);
    this.#before = input.slice(chunk);
    const entry = (name) => info.inputs.find((each) => each.name === name);
    this.#state ??= new Float32Array(entry("state").shape.reduce((size, d) => (typeof d === "number" ? size * d : size), 1));
    const inputs = { input, state: this.#state };
    if (entry("sr")) inputs.sr = toArray(entry("sr"), [rate]);
    const { outputs } = await this.#model.run(inputs, settings.sizes);
    this.#state = outputs.stateN;
    return outputs.output[0];
  }
}

/** Loudness of chunks as bars, probabilities as a curve over them. */
function draw(loudness, probabilities) {
  const canvas = find("plot"), pen = canvas.getContext("2d"), { width, height } = canvas;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
  const x = (i) => (width * i) / Math.max(1, probabilities.length - 1), y = (value) => (height - 12) * (1 - value) + 6;
  pen.clearRect(0, 0, width, height);
  pen.fillStyle = colour("--line");
  loudness.forEach((value, i) => pen.fillRect(x(i), y(value), Math.max(1, width / loudness.length), height - y(value)));
  pen.strokeStyle = colour("--faint");
  pen.setLineDash([6, 6]);
  pen.beginPath();
  pen.moveTo(0, y(threshold));
  pen.lineTo(width, y(threshold));
  pen.stroke();
  pen.setLineDash([]);
  pen.strokeStyle = colour("--accent");
  pen.lineWidth = 4;
  pen.beginPath();
  probabilities.forEach((value, i) => pen.lineTo(x(i), y(value)));
  pen.stroke();
}

/** Times of speech, in words. */
function spoken(probabilities) {
  const found = [];
  probabilities.forEach((value, i) => {
    if (value < threshold) return;
    if (found.at(-1)?.[1] === i) found.at(-1)[1] = i + 1;
    else found.push([i, i + 1]);
  });
  if (found.length === 0) return "No speech was found.";
  return `Speech: ${found.map(([first, end]) => `${seconds(first)} to ${seconds(end)} s`).join(", ")}.`;
}

const loudnessOf = (samples) => Math.min(1, 3 * Math.sqrt(samples.reduce((sum, value) => sum + value * value, 0) / samples.length));

await start(async (model) => {
  const loudness = [], probabilities = [];
  let taken = 0, recording = null;

  function clear() {
    loudness.length = probabilities.length = 0;
    taken = 0;
    find("found").textContent = find("time").textContent = "";
  }

  async function add(detector, samples) {
    const began = performance.now();
    probabilities.push(await detector.next(samples));
    taken += performance.now() - began;
    loudness.push(loudnessOf(samples));
  }

  function show() {
    draw(loudness, probabilities);
    find("found").textContent = spoken(probabilities);
    find("values").textContent = probabilities.map((value) => value.toFixed(4)).join(", ");
    find("time").textContent = `${seconds(probabilities.length)} s of sound in ${(taken / 1000).toFixed(2)} s`;
  }

  find("file").onchange = guarded(async () => {
    const [file] = find("file").files;
    if (file === undefined) return;
    const sound = readWav(await file.arrayBuffer());
    const samples = resampled(sound.samples, sound.rate, rate);
    const detector = new Detector(model), padded = new Float32Array(Math.ceil(samples.length / chunk) * chunk);
    padded.set(samples);
    clear();
    for (let at = 0; at < padded.length; at += chunk) {
      await add(detector, padded.slice(at, at + chunk));
      if (probabilities.length % 50 === 0) draw(loudness, probabilities);
    }
    show();
  });

  async function listen() {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    const audio = new AudioContext({ sampleRate: rate });
    await audio.audioWorklet.addModule("capture.mjs");
    const source = audio.createMediaStreamSource(stream), capture = new AudioWorkletNode(audio, "capture", { processorOptions: { chunk } });
    const detector = new Detector(model);
    let last = Promise.resolve();
    clear();
    capture.port.onmessage = ({ data }) => {
      last = last.then(() => add(detector, data)).then(show).catch(showError);
    };
    source.connect(capture);
    return async () => {
      source.disconnect();
      for (const track of stream.getTracks()) track.stop();
      await audio.close();
      await last;
    };
  }

  find("microphone").onclick = guarded(async () => {
    const ended = recording;
    recording = null;
    if (ended === null) recording = await listen();
    else await ended();
    find("microphone").textContent = recording === null ? "Microphone" : "Stop";
  });
});
