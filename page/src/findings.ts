// What makes the run slow or wasteful, most costly first, and what to change.

import { h } from "./dom";
import { NONE, number, percent } from "./format";
import { Panel, type Rows } from "./panel";
import type { Finding, Store } from "./store";

/** The cost of a finding: hours until the end, or else what it has cost. */
function cost({ to_end_s: left, lost_s: lost, cost_share: share }: Finding): string {
  const hours = left || lost;
  if (!hours) return share ? percent(share) : NONE;
  if (hours >= 360) return `−${number(hours / 3600, 2)} h`;
  return hours >= 60 ? `−${number(hours / 60, 2)} min` : `−${number(hours, 2)} s`;
}

export class FindingsPanel {
  readonly panel: Panel;

  constructor(private readonly store: Store) {
    this.panel = new Panel("Findings", "w12", () => this.table());
    this.update();
  }

  private table(): Rows {
    const found = this.store.panels.findings;
    return {
      columns: ["rule", "finding", "share of the time", "fix", "measured"],
      rows: [
        ...(found?.findings ?? []).map((finding) => [
          finding.rule,
          finding.sentence,
          finding.cost_share === null ? "" : percent(finding.cost_share),
          finding.fix,
          Object.entries(finding.evidence).map(([name, value]) => `${name} ${number(value)}`).join(", "),
        ]),
        ...Object.entries(found?.not_checked ?? {}).map(([what, why]) => ["not checked", what, "", "", why]),
      ],
    };
  }

  update(): void {
    const found = this.store.panels.findings;
    if (!found) {
      this.panel.describe("");
      this.panel.fill(h("p", { class: "empty" }, "The rules are being checked."));
      return;
    }
    if (found.problem) {
      this.panel.fill(h("p", { class: "problem" }, found.problem));
      return;
    }
    const rules = new Set(found.findings.map((finding) => finding.rule)).size;
    const unchecked = Object.keys(found.not_checked).length;
    this.panel.describe(
      `${rules} of ${found.checked.length} rules found something; ${unchecked} could not be checked; the cost is until the end, or of the whole run`,
    );
    const rows = found.findings.map((finding) =>
      h(
        "div",
        { class: "finding" },
        h("b", { title: finding.cost_share === null ? "cost unknown" : `${percent(finding.cost_share)} of the time` }, cost(finding)),
        h("span", {}, capitalize(finding.sentence) + (finding.simulated ? " (rule tested on simulated samples only)" : ".")),
        h("code", {}, finding.fix),
      ),
    );
    this.panel.fill(...(rows.length ? rows : [h("p", { class: "empty" }, `Nothing found. Checked: ${found.checked.join(", ")}.`)]));
  }
}

function capitalize(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
