//! The parts of a plot, as an SVG: panels with axes and lines.

use std::ops::Range;

/// Width and height of a panel.
pub const PANEL: [f64; 2] = [1000.0, 500.0];
/// The part of the panel between the axes. Names of the lines are to the right of it.
pub const PLOT: [Range<f64>; 2] = [80.0..790.0, 50.0..440.0];
/// Distance of two names.
pub const NAME_HEIGHT: f64 = 18.0;
/// Colours of the lines, which people with colour blindness can distinguish, too. The eighth line
/// uses the first colour again.
///
/// SOURCE: Okabe and Ito, Color Universal Design, 2008, without yellow, which is too light on
/// white.
pub const COLORS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
];

/// Colour of the lines at the marks.
pub const GRID: &str = "#ddd";

/// Puts panels into a document, one below the other.
pub fn document(panels: impl Iterator<Item = String>) -> String {
    let [width, height] = PANEL;
    let panels: Vec<String> = panels.collect();
    let total = height * panels.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {total}\" \
         font-family=\"sans-serif\" font-size=\"12\" stroke-width=\"1.5\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (index, panel) in panels.iter().enumerate() {
        let top = height * index as f64;
        svg += &format!("<g transform=\"translate(0 {top})\">\n{panel}</g>\n");
    }
    svg + "</svg>\n"
}

/// An axis, which maps values from `values.start` to `values.end` to places from `at.start` to
/// `at.end`.
#[derive(Debug)]
pub struct Axis {
    values: Range<f64>,
    at: Range<f64>,
    is_linear: bool,
}

impl Axis {
    /// Makes a linear axis of percentages.
    pub fn percent(at: Range<f64>) -> Self {
        Self {
            values: 0.0..100.0,
            at,
            is_linear: true,
        }
    }

    /// Makes a logarithmic axis with some room around the values; from 1 to 10 if there are none.
    pub fn new(values: impl Iterator<Item = f64> + Clone, at: Range<f64>) -> Self {
        let low = values.clone().fold(f64::INFINITY, f64::min);
        let high = values.fold(0.0, f64::max);
        let values = match high > 0.0 {
            true => low * 0.8..high * 1.25,
            false => 1.0..10.0,
        };
        Self {
            values,
            at,
            is_linear: false,
        }
    }

    /// Returns the place of a value.
    pub fn place(&self, value: f64) -> f64 {
        let Range { start, end } = self.values;
        let part = if self.is_linear {
            (value - start) / (end - start)
        } else {
            (value / start).ln() / (end / start).ln()
        };
        self.at.start + part * (self.at.end - self.at.start)
    }

    /// Returns the values to be marked: those of tens on a linear axis; on a logarithmic one 1, 2
    /// and 5 times each power of ten, or powers of ten alone if there are many.
    pub fn marks(&self) -> Vec<f64> {
        if self.is_linear {
            return (0..=10).map(|tens| f64::from(tens) * 10.0).collect();
        }
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

/// Draws lines without a filling.
pub fn path(d: &str, color: &str) -> String {
    format!("<path d=\"{d}\" stroke=\"{color}\" fill=\"none\"/>\n")
}

/// Writes words at a place.
pub fn text([x, y]: [f64; 2], anchor: &str, words: &str) -> String {
    let words = escape(words);
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>\n")
}

/// Formats the value of a mark without the rounding error of its binary fraction.
pub fn number(mark: f64) -> String {
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
