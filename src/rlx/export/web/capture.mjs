// The part of the voice page that runs in the audio thread: it hands on sound in chunks.

registerProcessor("capture", class extends AudioWorkletProcessor {
  constructor({ processorOptions: { chunk } }) {
    super();
    this.samples = new Float32Array(chunk);
    this.count = 0;
  }

  process([[channel]]) {
    for (const sample of channel ?? []) {
      this.samples[this.count++] = sample;
      if (this.count === this.samples.length) {
        this.port.postMessage(this.samples.slice());
        this.count = 0;
      }
    }
    return true;
  }
});
