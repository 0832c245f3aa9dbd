// Stacked bars of parts, predicted above measured, in the colours of `plan --plot`.

import { inkOn, shade, svg } from "./dom";
import type { PartRow } from "./store";

const WIDTH = 400;
const LEFT = 66;
const RIGHT = 62;

export function stackedBars(rows: PartRow[], colours: Record<string, string>, text: (value: number) => string, label: string): SVGSVGElement {
  const hasPrediction = rows.some((row) => row[2] !== null);
  const bars: [string, [string, number][], number][] = [];
  if (hasPrediction) {
    const spread = Math.hypot(...rows.map((row) => row[3] ?? 0));
    bars.push(["predicted", rows.map((row) => [row[0], row[2] ?? 0]), spread]);
  }
  bars.push(["measured", rows.map((row) => [row[0], row[1]]), 0]);
  const total = (parts: [string, number][]): number => parts.reduce((sum, part) => sum + part[1], 0);
  const most = Math.max(...bars.map(([, parts, spread]) => total(parts) + spread)) || 1;
  const scale = (WIDTH - LEFT - RIGHT) / most;
  const height = 12 + 38 * bars.length;
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label });
  bars.forEach(([name, parts, spread], at) => {
    const y = 8 + 38 * at;
    let x = LEFT;
    picture.append(svg("text", { x: LEFT - 6, y: y + 16, "text-anchor": "end" }, name));
    for (const [part, value] of parts) {
      const width = value * scale;
      const colour = shade(colours[part] ?? "#969696");
      picture.append(
        svg("rect", { x, y, width: Math.max(0, width - 1), height: 24, fill: colour }, svg("title", {}, `${part}: ${text(value)}`)),
      );
      if (width > 7 * part.length) {
        picture.append(svg("text", { x: x + 4, y: y + 16, class: inkOn(colour) === "#ffffff" ? "ink" : "dark" }, part));
      }
      x += width;
    }
    if (spread) {
      const [low, high] = [x - spread * scale, x + spread * scale];
      picture.append(svg("path", { class: "whisker", d: `M${low} ${y + 12}H${high}M${low} ${y + 7}v10M${high} ${y + 7}v10` }));
      x = high;
    }
    picture.append(svg("text", { x: x + 6, y: y + 16 }, text(total(parts))));
  });
  return picture;
}
