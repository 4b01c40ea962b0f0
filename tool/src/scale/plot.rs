//! The picture: accuracy over the seconds or tokens of a problem, with a line for each model and
//! method, and the front of the points that no other point beats in both.

use test_time_scaling::summary::SummaryRow;

use crate::svg::{Axis, COLORS, GRID, NAME_HEIGHT, PLOT, document, number, path, text};

/// The line of the front.
const FRONT: &str = "stroke-dasharray=\"6 4\" stroke=\"#888\" fill=\"none\"";

/// Draws the rows. `pass` is a separate line but never on the front: it chooses nothing.
pub fn draw(rows: &[SummaryRow]) -> String {
    let [across, down] = PLOT;
    let x = Axis::new(rows.iter().map(price), across.clone());
    let y = Axis::percent(down.end..down.start);
    let place = |row: &SummaryRow| [x.place(price(row)), y.place(row.accuracy * 100.0)];
    let (left, right, top, bottom) = (across.start, across.end, down.start, down.end);

    let mut out = text(
        [left, top - 26.0],
        "start",
        "Right answers, with intervals of 95 %",
    );
    for mark in x.marks() {
        let at = x.place(mark);
        out += &path(&format!("M{at:.1} {top}V{bottom}"), GRID);
        out += &text([at, bottom + 18.0], "middle", &number(mark));
    }
    for mark in y.marks() {
        let at = y.place(mark);
        out += &path(&format!("M{left} {at:.1}H{right}"), GRID);
        out += &text([left - 8.0, at + 4.0], "end", &number(mark));
    }
    out += &path(&format!("M{left} {top}V{bottom}H{right}"), "black");
    let middle = (left + right) / 2.0;
    out += &text(
        [middle, bottom + 40.0],
        "middle",
        match rows.iter().any(|row| row.seconds.is_some()) {
            true => "modelled seconds for a problem",
            false => "tokens sampled for a problem",
        },
    );
    out += &text(
        [left, top - 8.0],
        "start",
        "% (dashed: what no other point beats)",
    );

    let points: Vec<String> = front(rows).into_iter().map(place).map(point).collect();
    out += &format!("<polyline points=\"{}\" {FRONT}/>\n", points.join(" "));
    for (index, rows) in rows.chunk_by(|a, b| line(a) == line(b)).enumerate() {
        let color = COLORS[index % COLORS.len()];
        let points: Vec<String> = rows.iter().map(place).map(point).collect();
        let points = points.join(" ");
        out += &format!("<polyline points=\"{points}\" stroke=\"{color}\" fill=\"none\"/>\n");
        for row in rows {
            let [at, middle] = place(row);
            let [low, high] = [row.low, row.high].map(|share| y.place(share * 100.0));
            out += &path(&format!("M{at:.1} {low:.1}V{high:.1}"), color);
            out +=
                &format!("<circle cx=\"{at:.1}\" cy=\"{middle:.1}\" r=\"3\" fill=\"{color}\"/>\n");
        }
        let (at, height) = (right + 15.0, top + 10.0 + NAME_HEIGHT * index as f64);
        out += &path(&format!("M{at} {height}h20"), color);
        out += &text([at + 28.0, height + 4.0], "start", &line(&rows[0]));
    }
    document(std::iter::once(out))
}

fn point([x, y]: [f64; 2]) -> String {
    format!("{x:.1},{y:.1}")
}

/// The name of a row's line. A long model's name has its end left out.
fn line(row: &SummaryRow) -> String {
    let model: String = row.model.chars().take(12).collect();
    format!("{} {model}", row.method)
}

/// Returns the cost of a problem: seconds, or tokens if no model gives seconds.
fn price(row: &SummaryRow) -> f64 {
    row.seconds.unwrap_or(row.tokens.max(1.0))
}

/// Returns the rows that no other one beats: more right answers at no higher price.
fn front(rows: &[SummaryRow]) -> Vec<&SummaryRow> {
    let mut rows: Vec<&SummaryRow> = rows.iter().filter(|row| row.method != "pass").collect();
    rows.sort_by(|a, b| {
        price(a)
            .total_cmp(&price(b))
            .then(b.accuracy.total_cmp(&a.accuracy))
    });
    let mut most = f64::NEG_INFINITY;
    rows.retain(|row| {
        let is_better = row.accuracy > most;
        most = most.max(row.accuracy);
        is_better
    });
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(method: &str, tokens: f64, accuracy: f64) -> SummaryRow {
        SummaryRow {
            model: "m".into(),
            method: method.into(),
            n: 1,
            problems: 10,
            correct: 1,
            accuracy,
            low: 0.0,
            high: 1.0,
            tokens,
            seconds: None,
            joules: None,
        }
    }

    #[test]
    fn the_front_has_what_no_other_point_beats() {
        let rows = [
            row("pass", 1.0, 0.9),
            row("majority", 10.0, 0.2),
            row("majority", 20.0, 0.2),
            row("beam", 20.0, 0.5),
            row("majority", 40.0, 0.4),
            row("majority", 80.0, 0.6),
        ];
        let found: Vec<f64> = front(&rows).iter().map(|row| row.tokens).collect();
        assert_eq!(found, [10.0, 20.0, 80.0]);
        assert_eq!(front(&rows)[1].method, "beam");
        assert!(front(&[]).is_empty());
        assert!(draw(&rows).ends_with("</svg>\n"));
    }
}
