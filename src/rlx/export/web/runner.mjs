// The worker that runs the model: it answers messages of page.mjs.

let module, model;

const shapesOf = (entries) => Object.fromEntries(entries.map(({ name }) => [name, model.shape(name)]));

const answers = {
  async load({ name, threads }) {
    const onProgress = (loaded, total) => postMessage({ progress: [loaded, total] });
    module = await import(`./${name}.mjs`);
    model = await module.load(undefined, { threads, onProgress });
    return { info: module.info, threads: model.threads };
  },
  run({ inputs, sizes }) {
    const start = performance.now();
    const outputs = model.run(inputs, sizes);
    const milliseconds = performance.now() - start;
    return { outputs, shapes: shapesOf(module.info.outputs), milliseconds };
  },
  shapes({ sizes }) {
    model.bind(sizes);
    return shapesOf(module.info.inputs);
  },
  reset: () => model.reset(),
};

onmessage = async ({ data: { id, what, given } }) => {
  try {
    postMessage({ id, found: await answers[what](given) });
  } catch ({ name, message, code }) {
    postMessage({ id, error: { name, message, code } });
  }
};
