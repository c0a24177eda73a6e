// What all pages share: the settings, the model in a worker of its own, progress, errors, elements.

export const settings = await (await fetch("page.json")).json();

export const find = (id) => document.getElementById(id);

/** A new element; `about` has its properties, and texts among `children` stay texts. */
export function element(tag, about = {}, ...children) {
  const made = Object.assign(document.createElement(tag), about);
  made.append(...children);
  return made;
}

export function showError(error) {
  find("error").textContent = error === null ? "" : error.message;
  find("error").hidden = error === null;
}

/** A handler that shows what goes wrong in it; buttons are off until it has ended. */
export function guarded(handle) {
  return async (event) => {
    event?.preventDefault();
    const buttons = Array.from(document.querySelectorAll("button:not(.always):enabled"));
    for (const button of buttons) button.disabled = true;
    showError(null);
    try {
      await handle(event);
    } catch (error) {
      showError(error);
    } finally {
      for (const button of buttons) button.disabled = false;
    }
  };
}

export const counted = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
export const mebibytes = (bytes) => (bytes / 2 ** 20).toFixed(1);

/** The model, which runs in a worker so that the page can be used meanwhile. */
class RemoteModel {
  #worker = new Worker("runner.mjs", { type: "module" });
  #waiting = new Map();
  #asked = 0;

  constructor(onProgress) {
    this.#worker.onmessage = ({ data }) => {
      if (data.progress) {
        onProgress(...data.progress);
        return;
      }
      const { resolve, reject } = this.#waiting.get(data.id);
      this.#waiting.delete(data.id);
      if (data.error) reject(Object.assign(new Error(data.error.message), data.error));
      else resolve(data.found);
    };
    this.#worker.onerror = (event) => {
      for (const { reject } of this.#waiting.values()) reject(new Error(event.message ?? "the model's worker cannot be started"));
      this.#waiting.clear();
    };
  }

  #ask(what, given) {
    return new Promise((resolve, reject) => {
      this.#waiting.set(++this.#asked, { resolve, reject });
      this.#worker.postMessage({ id: this.#asked, what, given });
    });
  }

  async load(name, threads) {
    Object.assign(this, await this.#ask("load", { name, threads }));
  }

  /** {outputs, shapes, milliseconds}, by names */
  run(inputs, sizes) { return this.#ask("run", { inputs, sizes }); }
  /** The shapes of inputs at these sizes */
  shapes(sizes) { return this.#ask("shapes", { sizes }); }
  reset() { return this.#ask("reset", {}); }
}

/** Load the model and show the page; `prepare` gets the model first. */
export async function start(prepare) {
  const status = find("status"), bar = find("loading");
  const model = new RemoteModel((loaded, total) => {
    bar.value = loaded / total;
    status.textContent = `Loading weights: ${mebibytes(loaded)} of ${mebibytes(total)} MiB`;
  });
  try {
    const wanted = new URLSearchParams(location.search).get("threads");
    await model.load(settings.model, wanted === null ? undefined : Number(wanted));
    await prepare(model);
  } catch (error) {
    status.textContent = "The model cannot be used";
    showError(error);
    return;
  } finally {
    bar.hidden = true;
  }
  const why = crossOriginIsolated ? "" : " (the server sends no isolation headers)";
  status.textContent = `Ready, with ${counted(model.threads, "thread")}${why}`;
  find("main").hidden = false;
}
