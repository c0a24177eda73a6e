// Byte-level BPE, as GPT-2's and most later models use it: text to the numbers of tokens, and back.

/** The letters that such tokenizers write for bytes: printable ones stand for themselves. */
function byteLetters() {
  const found = [];
  let others = 256;
  for (let byte = 0; byte < 256; byte++) {
    const printable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
    found.push(String.fromCodePoint(printable ? byte : others++));
  }
  return found;
}

const LETTERS = byteLetters();
const BYTES = new Map(LETTERS.map((letter, byte) => [letter, byte]));
const escaped = (text) => text.replace(/[\\^$.*+?()[\]{}|/-]/g, "\\$&");

/** A text in parts: each match of a regular expression is one, and so is what lies between two. */
function isolated(text, split) {
  const found = [];
  let at = 0;
  for (const match of text.matchAll(split)) {
    if (match[0] === "") continue;
    if (match.index > at) found.push(text.slice(at, match.index));
    found.push(match[0]);
    at = match.index + match[0].length;
  }
  if (at < text.length) found.push(text.slice(at));
  return found;
}

export class LevelTokenizer {
  #tokens; #ids; #ranks; #splits; #whole; #named; #cut; #silent; #users; #begin;
  #known = new Map();

  constructor({ tokens, silent, users, named, begin, ends, splits, merges, whole }) {
    this.#tokens = tokens;
    this.#ids = new Map(tokens.map((token, i) => [token, i]));
    this.#ranks = new Map(merges.map((merge, i) => [merge, i]));
    this.#splits = splits.map((split) => new RegExp(split, "gu"));
    this.#whole = whole;
    this.#named = new Map(Object.entries(named));
    const names = [...this.#named.keys()].toSorted((a, b) => b.length - a.length);
    this.#cut = names.length > 0 ? new RegExp(names.map(escaped).join("|"), "g") : null;
    this.#silent = new Set(silent);
    this.#users = new Set(users);
    this.#begin = begin;
    this.ends = new Set(ends);
  }

  /** The tokens of a text; names of control tokens in it are these tokens, as templates need it. */
  encode(text) {
    text = text.toWellFormed();
    const found = this.#begin === null ? [] : [this.#begin];
    for (const part of this.#cut === null ? [text] : isolated(text, this.#cut)) {
      const token = this.#named.get(part);
      if (token === undefined) found.push(...this.#plain(part));
      else found.push(token);
    }
    if (this.#begin !== null && found[1] === this.#begin) found.shift();  // the template has written it, too
    return found;
  }

  #plain(text) {
    let parts = [text];
    for (const split of this.#splits) parts = parts.flatMap((part) => isolated(part, split));
    return parts.flatMap((part) => this.#word(part));
  }

  #word(word) {
    let found = this.#known.get(word);
    if (found === undefined) {
      const letters = Array.from(new TextEncoder().encode(word), (byte) => LETTERS[byte]);
      const one = this.#whole ? this.#ids.get(letters.join("")) : undefined;
      // A byte that is no token is left out; then its neighbours may be merged.
      found = one === undefined ? this.#merged(letters.filter((letter) => this.#ids.has(letter))).map((piece) => this.#ids.get(piece)) : [one];
      if (this.#known.size < 20000) this.#known.set(word, found);
    }
    return found;
  }

  /** Letters, of which the best pair is merged until none is left. */
  #merged(pieces) {
    while (pieces.length > 1) {
      let best = Infinity, at = -1;
      for (let i = 0; i + 1 < pieces.length; i++) {
        const rank = this.#ranks.get(`${pieces[i]} ${pieces[i + 1]}`);
        if (rank < best) [best, at] = [rank, i];
      }
      if (at < 0) break;
      pieces.splice(at, 2, pieces[at] + pieces[at + 1]);
    }
    return pieces;
  }

  #bytes(token) {
    if (this.#silent.has(token)) return new Uint8Array();
    const text = this.#tokens[token];
    const bytes = this.#users.has(token) ? [undefined] : Array.from(text, (letter) => BYTES.get(letter));
    return bytes.includes(undefined) ? new TextEncoder().encode(text) : Uint8Array.from(bytes);
  }

  /** A function that takes tokens one by one, at last none, and gives the text that is complete. */
  decoder() {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    return (token) => (token === undefined ? decoder.decode() : decoder.decode(this.#bytes(token), { stream: true }));
  }
}
