//! The picture, as an SVG: operations in a nanosecond over M, a line for each type and size of
//! weights, and crosses for the CPU. Both axes are logarithmic.

use std::ops::Range;
use std::path::Path;

use super::report::{BenchReport, BenchRow};
use crate::{ToolError, files};

/// Width and height of a device's panel.
const PANEL: [f64; 2] = [1000.0, 500.0];
/// The part of the panel between the axes. Names of the lines are to the right of it.
const PLOT: [Range<f64>; 2] = [80.0..790.0, 50.0..440.0];
/// Distance of two names.
const NAME_HEIGHT: f64 = 18.0;
/// Colours of the lines, which people with colour blindness tell apart, too. The eighth line takes
/// the first one again.
///
/// SOURCE: Okabe and Ito, Color Universal Design, 2008, without yellow, which is too light on white.
const COLORS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
];

/// Colour of the lines at the marks.
const GRID: &str = "#ddd";

/// Points of one type and size of weights: M, and operations in a nanosecond.
struct PlotLine {
    name: String,
    npu: Vec<[f64; 2]>,
    cpu: Vec<[f64; 2]>,
}

/// Draws a panel for each device, one below the other.
///
/// # Errors
/// Text that names the file.
pub fn draw(path: &Path, report: &BenchReport) -> Result<(), ToolError> {
    let [width, height] = PANEL;
    let total = height * report.devices.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {total}\" \
         font-family=\"sans-serif\" font-size=\"12\" stroke-width=\"1.5\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (index, device) in report.devices.iter().enumerate() {
        let rows = report.rows.iter().filter(|row| row.device == device.name);
        let top = height * index as f64;
        svg += &format!("<g transform=\"translate(0 {top})\">\n");
        svg += &panel(&device.description, &lines(rows));
        svg += "</g>\n";
    }
    svg += "</svg>\n";
    files::write(path, svg.as_bytes())
}

fn lines<'a>(rows: impl Iterator<Item = &'a BenchRow>) -> Vec<PlotLine> {
    let mut lines: Vec<PlotLine> = Vec::new();
    for row in rows {
        let name = format!("{} {}x{}", row.r#type, row.k, row.n);
        let index = lines
            .iter()
            .position(|line| line.name == name)
            .unwrap_or_else(|| {
                let (npu, cpu) = (Vec::new(), Vec::new());
                lines.push(PlotLine { name, npu, cpu });
                lines.len() - 1
            });
        let m = row.m as f64;
        lines[index].npu.push([m, row.gops]);
        if let Some(time) = row.cpu_microseconds {
            let gops = row.gops * row.microseconds / time;
            lines[index].cpu.push([m, gops]);
        }
    }
    lines
}

/// A logarithmic axis, on which values from `values.start` to `values.end` lie from `at.start` to
/// `at.end`.
struct Axis {
    values: Range<f64>,
    at: Range<f64>,
}

impl Axis {
    /// Makes an axis with some room around the values; from 1 to 10 if there are none.
    fn new(values: impl Iterator<Item = f64> + Clone, at: Range<f64>) -> Self {
        let low = values.clone().fold(f64::INFINITY, f64::min);
        let high = values.fold(0.0, f64::max);
        let values = match high > 0.0 {
            true => low * 0.8..high * 1.25,
            false => 1.0..10.0,
        };
        Self { values, at }
    }

    fn place(&self, value: f64) -> f64 {
        let part = (value / self.values.start).ln() / (self.values.end / self.values.start).ln();
        self.at.start + part * (self.at.end - self.at.start)
    }

    /// Returns the values to be marked: 1, 2 and 5 times each power of ten, or powers of ten alone if
    /// there are many.
    fn marks(&self) -> Vec<f64> {
        let [low, high] = [self.values.start, self.values.end].map(|value| value.log10().floor());
        let steps: &[f64] = if high - low > 3.0 {
            &[1.0]
        } else {
            &[1.0, 2.0, 5.0]
        };
        let powers = std::iter::successors(Some(low), |power| Some(power + 1.0));
        let powers = powers.take_while(|power| *power <= high);
        let marks =
            powers.flat_map(|power| steps.iter().map(move |step| step * 10_f64.powf(power)));
        marks
            .filter(|mark| (self.values.start..=self.values.end).contains(mark))
            .collect()
    }
}

fn panel(title: &str, lines: &[PlotLine]) -> String {
    let points = (lines.iter()).flat_map(|line| line.npu.iter().chain(&line.cpu));
    let [across, down] = PLOT;
    // The picture's y grows downwards.
    let x = Axis::new(points.clone().map(|point| point[0]), across.clone());
    let y = Axis::new(points.map(|point| point[1]), down.end..down.start);
    let place = |[m, gops]: &[f64; 2]| [x.place(*m), y.place(*gops)];
    let (left, right, top, bottom) = (across.start, across.end, down.start, down.end);

    let mut out = text([left, top - 26.0], "start", title);
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
    out += &text([middle, bottom + 40.0], "middle", "M: rows of activations");
    out += &text([left, top - 8.0], "start", "GOPS (crosses: CPU)");

    for (index, line) in lines.iter().enumerate() {
        let color = COLORS[index % COLORS.len()];
        let points = line.npu.iter().map(place);
        let points: Vec<String> = points.map(|[x, y]| format!("{x:.1},{y:.1}")).collect();
        let points = points.join(" ");
        out += &format!("<polyline points=\"{points}\" stroke=\"{color}\" fill=\"none\"/>\n");
        for [x, y] in line.cpu.iter().map(place) {
            out += &path(&format!("M{x:.1} {y:.1}m-4-4l8 8m-8 0l8-8"), color);
        }
        let (x, y) = (right + 15.0, top + 10.0 + NAME_HEIGHT * index as f64);
        out += &path(&format!("M{x} {y}h20"), color);
        out += &text([x + 28.0, y + 4.0], "start", &line.name);
    }
    out
}

fn path(d: &str, color: &str) -> String {
    format!("<path d=\"{d}\" stroke=\"{color}\" fill=\"none\"/>\n")
}

fn text([x, y]: [f64; 2], anchor: &str, words: &str) -> String {
    let words = escape(words);
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>\n")
}

/// Formats the value of a mark without the rounding error of its binary fraction.
fn number(mark: f64) -> String {
    let text = format!("{mark:.9}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Escapes text for an element. Characters that XML does not have, controls, become spaces.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_round_numbers_inside_of_the_axis() {
        let marks = |low: f64, high: f64| {
            let axis = Axis::new([low, high].into_iter(), 0.0..100.0);
            axis.marks().into_iter().map(number).collect::<Vec<_>>()
        };
        assert_eq!(marks(1.0, 4.0), ["1", "2", "5"]);
        assert_eq!(marks(0.3, 3.0), ["0.5", "1", "2"]);
        assert_eq!(marks(1.0, 65536.0), ["1", "10", "100", "1000", "10000"]);
    }

    #[test]
    fn values_lie_between_the_ends_in_the_order_of_their_logarithms() {
        let axis = Axis::new([1.0, 100.0].into_iter(), 440.0..50.0);
        let [low, middle, high] = [1.0, 10.0, 100.0].map(|value| axis.place(value));
        assert!(440.0 > low && low > middle && middle > high && high > 50.0);
        assert!((low + high - 2.0 * middle).abs() < 1e-9);
    }

    #[test]
    fn foreign_text_adds_no_element() {
        assert_eq!(escape("<a>&\u{1b}\n"), "&lt;a&gt;&amp;  ");
    }
}
