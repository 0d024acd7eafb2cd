/* Byte-level BPE, and what the page shows of its tokens: the same as in Python (tiktoken and
 * headlens/prompts.py). A tokenizer in the data:
 *
 *   {pattern: "gpt2" or "qwen35", words: packed bytes, special: [id]}
 *   words: for each id, the number of bytes of its token (uint16, little endian), then these bytes
 *   special: ids of special tokens, which have their id wherever they are written in a text */

import { inflate } from "./data.js";

// How a text is split: PATTERNS of clearhead/tokens/tokenizer.py. \p{White_Space} is what \s is there; in
// JavaScript, \s has U+FEFF and not U+0085. Without case, ſ is an s.
const SPLITS = {
  gpt2: [
    /'(?:[sdmt]|ll|ve|re)/u, / ?\p{L}+/u, / ?\p{N}+/u, / ?[^\p{White_Space}\p{L}\p{N}]+/u,
    /\p{White_Space}+(?!\P{White_Space})/u, /\p{White_Space}/u,
  ],
  qwen35: [
    /'(?:[sſtmd]|[STMD]|[rRvV][eE]|[lL][lL])/u, /[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+/u, /\p{N}/u,
    / ?[^\p{White_Space}\p{L}\p{M}\p{N}]+[\r\n]*/u, /\p{White_Space}*[\r\n]+/u,
    /\p{White_Space}+(?!\P{White_Space})/u, /\p{White_Space}+/u,
  ],
};
const LABELS = __LABELS__; // rules of headlens/prompts.py: {longest, controls, joiners, ...}
const IS_UNSEEN = new RegExp(`[${LABELS.unseen.map((kind) => `\\p{${kind}}`).join("")}]`, "u");
const IS_MARK = /\p{M}/u;
const BYTES_OF_TOKEN = /^(<0x[0-9A-F]{2}>)+$/;
const BYTES_OF_LABEL = /^␣*<0x[0-9A-F ]+>␣*$/;

/** Returns the tokenizer of a packed one: {encode, describe, label}. */
export async function readTokenizer({ pattern, words, special }) {
  const bytes = await inflate(words);
  const tokens = []; // the bytes of each id
  for (let at = 0; at < bytes.length;) {
    const end = at + 2 + bytes[at] + 256 * bytes[at + 1];
    tokens.push(bytes.subarray(at + 2, end));
    at = end;
  }
  const ids = new Map(); // of the tokens of texts: a string with one character for each byte -> id
  tokens.forEach((token, id) => {
    if (!special.includes(id)) ids.set(String.fromCharCode(...token), id);
  });
  const specials = new Map(special.map((id) => [textOfBytes(tokens[id]), id]));
  const split = new RegExp(SPLITS[pattern].map(({ source }) => source).join("|"), "gu");
  const textOf = (id) => (tokens[id] ? textOfBytes(tokens[id]) : `<id ${id}>`);
  return {
    /** Returns the ids of a text; with more than `most`, only some more than that. */
    encode: (text, most = Infinity) => encodeText(text, split, ids, specials, most),
    /** Returns {tokens, texts, labels, signs} of ids, as Prompt.tokens, texts_of, labels_of, signs_of. */
    describe(list) {
      const texts = list.map(textOf);
      const joined = joinedCharacters(texts);
      return {
        tokens: texts,
        texts: joined.map(([text]) => withSigns(text)),
        labels: joined.map(([, label]) => tokenLabel(label)),
        signs: signsOf(joined),
      };
    },
    /** Returns the label of a token alone, as of a predicted one. */
    label: (id) => tokenLabel(joinedCharacters([textOf(id)])[0][1]),
  };
}

/** Returns the ids of a text, see readTokenizer. A lone surrogate becomes U+FFFD. */
function encodeText(text, split, ids, specials, most) {
  const encoder = new TextEncoder();
  const wellFormed = new TextDecoder("utf-8", { ignoreBOM: true }).decode(encoder.encode(text));
  const names = [...specials.keys()].map((name) => name.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&"));
  const found = [];
  for (const part of wellFormed.split(new RegExp(`(${names.join("|")})`, "u"))) {
    const pieces = specials.has(part) ? [] : part.matchAll(split);
    if (specials.has(part)) found.push(specials.get(part));
    for (const [piece] of pieces) {
      for (const token of mergedTokens(encoder.encode(piece), ids)) found.push(ids.get(token));
      if (found.length > most) return found;
    }
  }
  return found;
}

/** Merges the bytes of a piece to tokens, strings with one character for each byte: again and again the
 * pair of neighbours whose token has the lowest id.
 *
 * All pairs with this id are merged at once, from left to right: a pair with one of the new tokens has a
 * higher id, as it is longer and was found later. */
function mergedTokens(bytes, ids) {
  let tokens = Array.from(bytes, (byte) => String.fromCharCode(byte));
  const idOf = (left, right) => ids.get(left + right) ?? Infinity;
  let pairs = tokens.slice(1).map((token, n) => idOf(tokens[n], token));
  for (;;) {
    const lowest = pairs.reduce((a, b) => Math.min(a, b), Infinity);
    if (lowest === Infinity) return tokens;
    const merged = [], isNew = [], known = [];
    for (let n = 0; n < tokens.length; n++) {
      const isPair = pairs[n] === lowest;
      merged.push(isPair ? tokens[n] + tokens[n + 1] : tokens[n]);
      isNew.push(isPair);
      known.push(pairs[n]);
      if (isPair) n++;
    }
    pairs = merged.slice(1).map((token, n) =>
      (isNew[n] || isNew[n + 1] ? idOf(merged[n], token) : known[n]));
    tokens = merged;
  }
}

const strictDecoder = () => new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** Returns the text of a token; bytes of incomplete UTF-8 as <0xE2>. */
function textOfBytes(bytes) {
  try {
    return strictDecoder().decode(bytes);
  } catch {
    return Array.from(bytes, (byte) =>
      `<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`).join("");
  }
}

/** Returns [text, label] of each token: see _joined of headlens/prompts.py. */
function joinedCharacters(tokens) {
  const joined = tokens.map((token) => [token, token]);
  for (let first = 0; first < tokens.length;) {
    const owners = []; // the token of each byte
    const decoder = strictDecoder();
    let found = "", text = "", n = first;
    try {
      while (n < tokens.length && BYTES_OF_TOKEN.test(tokens[n])) {
        const own = tokens[n].match(/[0-9A-F]{2}(?=>)/g).map((hex) => parseInt(hex, 16));
        found += decoder.decode(new Uint8Array(own), { stream: true });
        owners.push(...own.map(() => n));
        n++;
        if (new TextEncoder().encode(found).length === owners.length) { // the character is complete
          text = n - first > 1 ? found : ""; // one token is a text such as <0x41>
          break;
        }
      }
    } catch {
      // bytes of no character
    }
    for (let i = first; text && i < n; i++) joined[i] = ["", ""];
    let at = 0;
    for (const character of text) {
      const { length } = new TextEncoder().encode(character);
      const of = [...new Set(owners.slice(at, at + length))];
      of.forEach((owner, part) => {
        const [known, label] = joined[owner];
        const stem = IS_MARK.test(character) ? trimmedEnd(label, LABELS.parts) : label;
        const number = label.slice(stem.length) + (of.length > 1 ? LABELS.parts[part] : "");
        joined[owner] = [known + (part ? "" : character), stem + character + number];
      });
      at += length;
    }
    first = text ? n : first + 1;
  }
  return joined;
}

function trimmedEnd(text, characters) {
  let end = text.length;
  while (end && characters.includes(text[end - 1])) end--;
  return text.slice(0, end);
}

function trimmedStart(text, characters) {
  let start = 0;
  while (start < text.length && characters.includes(text[start])) start++;
  return text.slice(start);
}

function tokenLabel(token) {
  const { spaces, joiners, longest } = LABELS;
  let inner = trimmedEnd(trimmedStart(token, spaces), spaces);
  const before = inner ? token.length - trimmedStart(token, spaces).length : token.length;
  const after = token.length - before - inner.length;
  if (BYTES_OF_TOKEN.test(inner)) inner = inner.replaceAll("><0x", " ");
  const shown = [...withSigns("␣".repeat(before) + inner + "␣".repeat(after))];
  if (!shown.length) return "∅";
  if (shown.every((character) => joiners.includes(character))) return "·";
  return (shown.length > longest ? [...shown.slice(0, longest - 1), "…"] : shown).join("");
}

/** Returns a text with signs in place of characters that cannot be seen: one for each. */
const withSigns = (text) => Array.from(text, (character) => LABELS.controls[character]
  ?? (IS_UNSEEN.test(character) && !LABELS.joiners.includes(character) ? "·" : character)).join("");

/** Returns an explanation of the signs in labels. joined: [text, label] of each token. */
function signsOf(joined) {
  const labels = joined.map(([, label]) => tokenLabel(label));
  const used = labels.map((label) => trimmedEnd(label, "…")).join("");
  const meanings = Object.entries(LABELS.signs)
    .filter(([sign]) => used.includes(sign)).map(([sign, what]) => `${sign} ${what}`);
  const bytes = labels.find((label) => BYTES_OF_LABEL.test(label));
  if (bytes) meanings.push(`${bytes} part of a character, in bytes`);
  const part = labels[joined.findIndex(([text, label]) => text !== label)];
  if (part) meanings.push(`${part} part of a character that has several tokens`);
  return meanings.join(" · ");
}
