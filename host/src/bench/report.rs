//! The results: JSON for machines, a table for people.

use serde_json::{Value, json};

use super::machine::Machine;
use super::paired::{Measured, Row};
use super::stats::Summary;

/// Version of the JSON's shape.
const SCHEMA: u32 = 1;

/// All that a bench has to say.
pub(super) struct Report {
    /// When it started, in UTC.
    pub(super) date: String,
    pub(super) machine: Machine,
    /// What was served, as JSON has it.
    pub(super) model: Value,
    /// How it was run.
    pub(super) settings: Value,
    pub(super) sides: Vec<Value>,
    pub(super) memory: Memory,
    pub(super) measured: Vec<Measured>,
    /// What was not measured, and why.
    pub(super) skipped: Vec<(String, String)>,
}

/// Bytes of this process: the server, the engine and the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Memory {
    /// Keys and values.
    pub(super) kv: u64,
    /// The most that was resident when the model had been loaded.
    pub(super) peak_after_load: Option<u64>,
    /// The most that was resident at the end.
    pub(super) peak: Option<u64>,
}

impl Report {
    pub(super) fn to_json(&self) -> Value {
        let Memory { kv, peak_after_load, peak } = self.memory;
        json!({
            "schema": SCHEMA,
            "version": env!("CARGO_PKG_VERSION"),
            "date": self.date,
            "machine": self.machine,
            "model": self.model,
            "settings": self.settings,
            "sides": self.sides,
            "memory": { "kv_bytes": kv, "peak_after_load_bytes": peak_after_load, "peak_bytes": peak },
            "measures": self.measured.iter().map(measure_json).collect::<Vec<_>>(),
            "skipped": self.skipped.iter().map(|(what, why)| json!({ "measure": what, "reason": why })).collect::<Vec<_>>(),
        })
    }

    pub(super) fn to_table(&self) -> String {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut lines = vec![
            format!(
                "forkpoint {}, {}, {} ({}{}), keys and values in {}, {}",
                env!("CARGO_PKG_VERSION"),
                self.date,
                text(&self.model["name"]),
                mib(self.model["file_bytes"].as_u64()),
                self.model["quantize"].as_str().map(|to| format!(", packed to {to}")).unwrap_or_default(),
                text(&self.model["kv_precision"]),
                text(&self.model["device"]),
            ),
            format!(
                "{}, {} cores, load average {}",
                self.machine.cpu.as_deref().unwrap_or("unknown processor"),
                self.machine.cores,
                self.machine.load_average.map_or("unknown".to_owned(), |load| format!("{load:.2}")),
            ),
        ];
        if !self.machine.quiet {
            lines.push(
                "warning: something else runs on this machine; its figures are not to be trusted".into(),
            );
        }
        lines.push(String::new());
        let header = ["measure", "side", "median", "spread", "ratio", "spread", ""].map(str::to_owned);
        let rows: Vec<[String; 7]> =
            std::iter::once(header).chain(self.measured.iter().flat_map(table_rows)).collect();
        lines.extend(align(&rows));
        lines.push(String::new());
        let Memory { kv, peak_after_load, peak } = self.memory;
        lines.push(format!(
            "memory: keys and values {}, peak after loading {}, peak at the end {}",
            mib(Some(kv)),
            mib(peak_after_load),
            mib(peak)
        ));
        lines.extend(self.skipped.iter().map(|(what, why)| format!("not measured: {what}: {why}")));
        let notes = self.measured.iter().flat_map(|measured| {
            measured.notes.iter().map(move |note| format!("note: {}: {note}", measured.case.name))
        });
        lines.extend(notes);
        if self.measured.iter().any(|measured| measured.rows.len() > 1) {
            lines.push(
                "ratio: how many times better Forkpoint is, the median of pairs; spread: quartiles, of fewer than 5 \
                 the range; as long: how many times its time Forkpoint takes"
                    .into(),
            );
        }
        lines.join("\n") + "\n"
    }
}

fn measure_json(measured: &Measured) -> Value {
    let case = &measured.case;
    let metrics = case.metrics.iter().enumerate().map(|(at, metric)| {
        let rows = measured.rows.iter().map(|row| row_json(measured, row, at));
        json!({
            "name": metric.name,
            "unit": metric.unit,
            "higher_is_better": metric.higher_is_better,
            "sides": rows.collect::<Vec<_>>(),
        })
    });
    json!({
        "measure": case.measure,
        "name": case.name,
        "facts": case.facts,
        "metrics": metrics.collect::<Vec<_>>(),
        "notes": measured.notes,
    })
}

fn row_json(measured: &Measured, row: &Row, metric: usize) -> Value {
    let Some(best) = row.best(&measured.case) else {
        return json!({ "side": row.side, "kind": row.kind, "lacks": row.lacks });
    };
    let way = |name: &str| (!name.is_empty()).then(|| name.to_owned());
    let mut shown = json!({ "side": row.side, "kind": row.kind, "way": way(best.name) });
    spread_into(&mut shown, &best.values(metric));
    if row.ways.len() > 1 {
        let others = row.ways.iter().map(|other| {
            let mut shown = json!({ "way": way(other.name) });
            spread_into(&mut shown, &other.values(metric));
            shown
        });
        shown["ways"] = others.collect();
    }
    if let Some(ratio) = measured.ratio(row, metric) {
        let says = if measured.case.yardstick { "times as long" } else { "times better" };
        let mut against = json!({ "says": says, "best_of_its_kind": ratio.best_of_its_kind });
        spread_into(&mut against, &ratio.pairs);
        shown["ratio"] = against;
    }
    shown
}

fn spread_into(shown: &mut Value, samples: &[f64]) {
    shown["samples"] = json!(samples);
    if let Some(summary) = Summary::of(samples) {
        shown["median"] = json!(summary.median);
        shown["q1"] = json!(summary.quartiles.0);
        shown["q3"] = json!(summary.quartiles.1);
        shown["min"] = json!(summary.min);
        shown["max"] = json!(summary.max);
    }
}

/// A line for each metric and side; the measure's name stands on the first.
fn table_rows(measured: &Measured) -> Vec<[String; 7]> {
    let mut rows = Vec::new();
    for (at, metric) in measured.case.metrics.iter().enumerate() {
        let single = measured.case.metrics.len() == 1;
        let name = if single { String::new() } else { format!(" {}", metric.name) };
        let mut title = format!("{}{name}, {}", measured.case.name, metric.unit);
        for row in &measured.rows {
            let title = std::mem::take(&mut title);
            let best = row.best(&measured.case);
            let Some((way, summary)) = best.and_then(|way| Some((way, Summary::of(&way.values(at))?))) else {
                if at > 0 {
                    // Said once for all metrics.
                    continue;
                }
                let why = row.lacks.as_deref().unwrap_or("no figures");
                let lacks = format!("lacks this: {why}");
                rows.push([
                    title,
                    row.side.clone(),
                    "-".into(),
                    String::new(),
                    String::new(),
                    String::new(),
                    lacks,
                ]);
                continue;
            };
            let (ratio, spread, best) = match measured.ratio(row, at) {
                None => Default::default(),
                Some(ratio) => {
                    let (low, high) = ratio.summary.spread();
                    let alone = measured.rows.iter().filter(|other| other.kind == row.kind).count() == 1;
                    let best = match ratio.best_of_its_kind {
                        _ if measured.case.yardstick => "as long".to_owned(),
                        true if !alone => format!("best {}", row.kind),
                        _ => String::new(),
                    };
                    (format!("{:.2}x", ratio.summary.median), format!("{low:.2} to {high:.2}"), best)
                }
            };
            let (low, high) = summary.spread();
            let side =
                if way.name.is_empty() { row.side.clone() } else { format!("{} ({})", row.side, way.name) };
            let range = format!("{} to {}", number(low), number(high));
            rows.push([title, side, number(summary.median), range, ratio, spread, best]);
        }
    }
    rows
}

/// Columns of one width each, numbers to the right.
fn align(rows: &[[String; 7]]) -> Vec<String> {
    const RIGHT: [bool; 7] = [false, false, true, true, true, true, false];
    // The last column is free.
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 6] = std::array::from_fn(width);
    let line = |row: &[String; 7]| {
        let cells = row.iter().enumerate().map(|(column, cell)| match widths.get(column) {
            None => cell.clone(),
            Some(&width) if RIGHT[column] => format!("{cell:>width$}"),
            Some(&width) => format!("{cell:<width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// A number with three digits or more, thousands apart.
fn number(value: f64) -> String {
    let magnitude = value.abs();
    let decimals = if magnitude >= 100.0 {
        0
    } else if magnitude >= 10.0 {
        1
    } else {
        2
    };
    let text = format!("{value:.decimals$}");
    let whole = text.split('.').next().unwrap_or_default().len();
    let mut shown = String::new();
    for (at, c) in text.chars().enumerate() {
        if at > 0 && at < whole && (whole - at).is_multiple_of(3) && c.is_ascii_digit() {
            shown.push(',');
        }
        shown.push(c);
    }
    shown
}

fn mib(bytes: Option<u64>) -> String {
    bytes.map_or("unknown".to_owned(), |bytes| format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_readable() {
        for (value, shown) in [
            (0.123, "0.12"),
            (9.999, "10.00"),
            (12.34, "12.3"),
            (123.4, "123"),
            (1234.5, "1,234"),
            (1e6, "1,000,000"),
        ] {
            assert_eq!(number(value), shown);
        }
    }

    #[test]
    fn columns_stand_under_each_other() {
        let row = |cells: [&str; 7]| cells.map(str::to_owned);
        let lines = align(&[
            row(["measure", "side", "median", "spread", "ratio", "spread", ""]),
            row(["a", "forkpoint", "1,234", "1 to 2", "", "", ""]),
            row(["", "llama", "5", "4 to 6", "2.00x", "1.00 to 3.00", "best llama"]),
        ]);
        assert_eq!(lines[0], "measure  side       median  spread  ratio        spread");
        assert_eq!(lines[1], "a        forkpoint   1,234  1 to 2");
        assert_eq!(lines[2], "         llama           5  4 to 6  2.00x  1.00 to 3.00  best llama");
    }
}
