// The study whose trials the runs are: counts, the best result so far, and the best trials.

import { Chart } from "./chart";
import { h, theme } from "./dom";
import { count, number, seconds } from "./format";
import { Panel, type Rows } from "./panel";
import type { Store, Study } from "./store";

export class StudyPanel {
  readonly panel = new Panel("Study", "w12", () => this.table());
  private readonly sentence = h("p", {});
  private readonly trials = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Trials" });
  private readonly chart = new Chart({
    label: "Best result over trials",
    height: 160,
    group: "study",
    text: (value) => number(value),
    textX: (value) => count(value),
    onCursor: (text) => this.panel.point(text),
  });

  constructor(private readonly store: Store) {
    this.panel.fill(this.sentence, this.chart.element, this.trials);
  }

  private get study(): Study | null {
    return this.store.panels.study ?? null;
  }

  get isShown(): boolean {
    return this.study !== null;
  }

  private table(): Rows {
    const study = this.study;
    if (!study?.rows) return { columns: [], rows: [] };
    return {
      columns: ["trial", ...study.goals, ...study.parameters, "seconds", "state", "message"],
      rows: study.rows.map(([trial, , state, results, values, time, message]) => [trial, ...results, ...values, time, state, message]),
    };
  }

  update(): void {
    const study = this.study;
    if (!study) return;
    if (!study.rows) {
      this.panel.fill(h("p", { class: "problem" }, study.problem ?? "The study cannot be read."));
      return;
    }
    if (!this.sentence.isConnected) this.panel.fill(this.sentence, this.chart.element, this.trials);
    this.panel.rename(`Study ${study.name}`);
    this.panel.describe(`${study.goals.join(", ")}; ${study.search}`);
    const best = study.rows.find(([, isBest]) => isBest);
    const result = best ? ` Best: trial ${best[0]}, ${study.goals.map((goal, at) => `${goal.split(" ")[1]} ${number(best[3][at])}`).join(", ")}.` : "";
    this.sentence.textContent = `${study.counts}, of ${count(study.planned)} planned.${result}`;
    const { trial, value, best: bests } = study.curve;
    const x = trial.map((_, at) => at + 1);
    this.chart.element.hidden = x.length < 2;
    this.chart.update(x, [
      { name: "best so far", colour: theme("acc"), y: bests },
      { name: "each trial", colour: theme("mut"), y: value, dash: [2, 4] },
    ]);
    this.trials.replaceChildren(this.buildTable(study));
  }

  private buildTable(study: Study): HTMLTableElement {
    const runs = new Map((this.store.panels.runs ?? []).map((row) => [row.name, row.id]));
    const heads = ["trial", ...study.goals, ...study.parameters, "time", "state"];
    const rows = (study.rows ?? []).map(([trial, isBest, state, results, values, time, message]) => {
      const run = runs.get(String(trial));
      const name = `${trial}${isBest ? "*" : ""}`;
      return h(
        "tr",
        {},
        h("td", { class: "n" }, run ? h("a", { href: `#run=${run}` }, name) : name),
        ...results.map((result) => h("td", { class: "n" }, result === null ? "" : number(result))),
        ...values.map((value) => h("td", { class: "n" }, value)),
        h("td", { class: "n" }, time ? seconds(time) : ""),
        h("td", { class: `text ${state}`, title: message }, message ? `${state}: ${message}` : state),
      );
    });
    return h("table", {}, h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col", class: head === "state" ? "" : "n" }, head)))), h("tbody", {}, ...rows));
  }
}
