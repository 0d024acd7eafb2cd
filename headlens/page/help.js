/* The help dialog: keyboard shortcuts, statistics and colours. */

import { $, make } from "./dom.js";
import { headName, placeOfHead, run, statisticOf, textName } from "./state.js";

const KEYS = [
  ["← → ↑ ↓", "move to a neighbouring head"],
  ["Enter, Space", "enlarge the focused head"],
  ["Esc", "close the enlarged head"],
  [", .", "previous step, next step"],
  ["Space", "anywhere else: play or pause"],
  ["p", "next prompt"],
  ["Shift ← → ↑ ↓", "move to a neighbouring cell of the enlarged heatmap"],
  ["v", "map: weights, or weights times value norms"],
  ["d", "compare with the first step or the other run; stop the comparison"],
  ["t", "light or dark theme"],
  ["← →", "on the first screen, in the prompt: another query token"],
  ["Enter", "in the line to type in: let the model continue, or stop it; Shift Enter: a new line"],
  ["?", "show this help"],
];

export function buildHelp() {
  const list = (pairs) => make("dl", {}, ...pairs.flatMap(([term, text, id = ""]) => [
    make("dt", { id }, term), make("dd", { textContent: text })]));
  const heading = (textContent) => make("h2", { textContent });
  const text = (textContent) => make("p", { textContent });
  const close = make("button", { textContent: "close" });
  close.addEventListener("click", () => $("help").close());
  const title = make("h2", { id: "help-title", textContent: "How to read this page" });
  const limits = run.statistics.filter((of) => of.is_name && of.named_from)
    .map((of) => `${of.title} ${of.named_from}`).join(", ");
  const positional = statisticOf(run, "positional")?.named_from;
  const rest = statisticOf(run, "learned_sink") ? ", or to less: the rest goes to a learned sink" : "";
  const last = run.count - 1;
  const place = placeOfHead(last);
  const keys = KEYS.map(([key, does]) => [make("kbd", { textContent: key }), does]);
  $("help").append(
    make("header", {}, title, close),
    text("Each heatmap shows one attention head on one prompt. Each row is a query token, each " +
      "column is a key token, and a brighter cell is a larger attention weight. The weights of a " +
      `row sum to one${rest}. A token cannot attend to later tokens, so the upper right is empty. ${headName(last)} ` +
      `is head ${place.head} of layer ${run.numbers[place.layer]}. Layers, heads and positions are counted from 0.`),
    heading("Statistics"),
    text((run.windows
      ? `Each value is the mean over windows of ${textName()}, with its standard error over windows. `
      : "Each value is the mean over all prompts on which the statistic is defined. ") +
      "The repeated sequence is a prompt of random tokens, written twice. Next to a value is its " +
      "chance: the value of uniform attention, with equal weights on all key tokens that the query " +
      "token can see in this layer."),
    list(run.statistics.map((of) => [of.title, of.description, `about-${of.key}`])),
    heading("Names of heads"),
    text("A name says where a head attends. It does not say that the model needs the head."),
    text("The significance of a statistic is (value − chance) / (1 − chance): 0 for uniform " +
      `attention, at most 1. A head has the name whose significance is largest, if it is at least: ${limits}` +
      (run.windows ? `. This holds on ${textName()}, at least three times the standard error above ` +
        "chance, or for induction and duplicate token on the repeated sequence."
        : ", on every prompt on which it is defined.")),
    text("A head with none of these names is positional if its value of this statistic is at least " +
      `${positional}, and uniform (without a letter) if its entropy is nearly that of uniform attention.`),
    text("“Since step N”: it has its name at all snapshots from step N on. It keeps the name down to " +
      "three quarters of the limit, so that it does not lose it by noise."),
    ...(run.windows ? [heading(`Where a head does it in ${textName()}`),
      text("The strongest five are the largest weights times the norm of the value vector after the " +
        "output projection, in all windows, of different pairs of tokens: the head at its best. The " +
        "five query tokens at random, the same for all heads, show what it usually does. A head " +
        "connects a query token with the key token that it moves most, if the weight is at least 0.2. " +
        "The first token of a window and the query token itself do not count.")] : []),
    heading("Predictions"),
    text("At each token, the model predicts the next token. The loss is −ln of the probability of " +
      "the true next token, in nats: 0 if it is certain, 0.7 if its probability is a half."),
    heading("Removed heads"),
    text("The context vector of a removed head is replaced at every position by its mean over all " +
      "windows (mean ablation). If the loss then increases, the model needs the head."),
    heading("Parts of an attention score"),
    text("The input of a layer is a sum of what the token, its position and the earlier heads and MLPs " +
      "wrote, so the score is a sum over pairs: what wrote the query, what wrote the key. The parts " +
      "are exact, with the scale of the norm as it is at these tokens. Only differences to the mean " +
      "of the row count, because a softmax follows (Elhage et al. 2021)."),
    heading("Value-weighted attention"),
    text("The output of a head is a sum of vectors, one for each key token: its weight times its " +
      "value vector after the output projection. “weights × value norm” shows their lengths: a token " +
      "with a short value vector adds little, as often the first token (Kobayashi et al. 2020)."),
    heading("Colours"),
    text("The colour scale is that of the square root: a weight of 0.04 is a fifth as bright as a " +
      "weight of 1. A comparison shows B − A: orange where B has more weight, blue where B has " +
      "less. If A and B are two steps of one run, A is the earlier step."),
    heading("Keyboard shortcuts"), list(keys),
  );
  $("help").addEventListener("click", (event) => {
    if (event.target === $("help")) $("help").close(); // a click outside the dialog
  });
}

export function openHelp(key = null) {
  if (!$("help").open) $("help").showModal();
  $("help").scrollTop = 0;
  if (key !== null) $(`about-${key}`)?.scrollIntoView({ block: "center" });
}
