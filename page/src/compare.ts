// Comparison of the run that is shown, the baseline, with other runs; and where a run comes from.

import { h, legend, theme } from "./dom";
import { NONE, count, number, seconds, short } from "./format";
import { lineColour } from "./machine";
import { Panel, tableOf, type Rows } from "./panel";
import type { Header, Store } from "./store";

const text = (value: string | number | boolean | null | undefined): string => (value === null || value === undefined ? NONE : String(value));

// What is compared besides settings: name, and its text for a run.
const RESULTS: [string, (run: Header) => string][] = [
  ["state", (run) => run.state],
  ["step", (run) => count(run.step)],
  ["samples/s", (run) => short(run.samples_per_s)],
  ["time of a step", (run) => seconds(run.step_s)],
  ["plan", (run) => `${text(run.plan)} on ${count(run.ranks)}`],
  ["device", (run) => text(run.device)],
];

export class ComparePanels {
  readonly comparison: Panel;
  readonly origin: Panel;

  constructor(private readonly store: Store) {
    this.comparison = new Panel("Comparison", "w12", () => this.table());
    this.origin = new Panel("Provenance", "w12", () => this.originTable());
  }

  get isComparing(): boolean {
    return (this.store.panels.comparison?.runs.length ?? 0) > 0;
  }

  private table(): Rows {
    const { header, comparison } = this.store.panels;
    if (!header || !comparison) return { columns: [], rows: [] };
    const runs = [header, ...comparison.runs];
    const metrics = [...new Set(runs.flatMap((run) => Object.keys(run.metrics ?? {})))];
    const rows: string[][] = [
      ...RESULTS.map(([name, show]) => [name, ...runs.map(show)]),
      ...metrics.map((name) => [name, ...runs.map((run) => number(run.metrics?.[name]))]),
    ].filter((row) => new Set(row.slice(1)).size > 1);
    return {
      columns: ["what differs", `${header.name} (baseline)`, ...comparison.runs.map((run) => run.name)],
      rows: [...rows, ...comparison.differences.map(([name, ...values]) => [name, ...values.map(text)])],
    };
  }

  private originTable(): Rows {
    const { origin = [], request = [] } = this.store.panels.origin ?? {};
    return { columns: ["name", "value"], rows: [...origin, ...request].map(([name, value]) => [name, text(value)]) };
  }

  update(): void {
    const { header, comparison, origin } = this.store.panels;
    if (comparison && header) {
      const names: [string, string][] = [[header.name, theme("acc")], ...comparison.runs.map((run, at): [string, string] => [run.name, lineColour(at + 1)])];
      this.comparison.describe("only what differs; the run that is shown is the baseline");
      const problems = comparison.runs.filter((run) => run.problem).map((run) => h("p", { class: "problem" }, `${run.name}: ${run.problem}`));
      this.comparison.fill(legend(names), h("div", { class: "scroll", tabindex: 0 }, tableOf(this.table())), ...problems);
    }
    if (origin) {
      this.origin.describe("where the run comes from, and its request");
      const rows = this.originTable();
      this.origin.fill(
        origin.problem ? h("p", { class: "problem" }, origin.problem) : null,
        rows.rows.length
          ? h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Provenance" }, tableOf(rows))
          : h("p", { class: "empty" }, "The run has neither provenance.json nor spec.toml."),
      );
    }
  }
}
