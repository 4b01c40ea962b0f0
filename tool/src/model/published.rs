//! Speeds that others published, and rates that fit them.

use ggml_rust_npu::hexagon::caps::HexRates;

const PUBLISHED: &str = include_str!("../../../docs/results/published.txt");

/// Rates from which the time of a step is computed.
#[derive(Clone, Copy)]
pub struct Rates {
    /// Rates of one thread, of memory and of the matrix unit.
    pub each: HexRates,
    /// The matrix unit works while the threads do.
    pub is_beside: bool,
}

/// A published speed of a model.
pub struct Speed<'a> {
    /// The type of the weights.
    pub weight: &'a str,
    /// Tokens each second of a prompt; `-` if it is not known.
    pub prompt: &'a str,
    /// Tokens each second of generation; `-` if it is not known.
    pub generation: &'a str,
    /// The program, and where its speed was published.
    pub source: &'a str,
}

/// Returns the lines of a kind, without its name.
fn lines(kind: &str) -> impl Iterator<Item = &str> {
    PUBLISHED
        .lines()
        .filter_map(move |line| line.strip_prefix(kind)?.strip_prefix(' '))
}

/// Returns the lowest and the highest rates that fit the published speeds of a workload, `prompt`
/// or `token`, the rates that are not fitted are those of `chip`.
pub fn fitted(workload: &str, chip: HexRates) -> [Rates; 2] {
    let mut found = lines("rates").filter_map(|line| {
        let mut words = line.strip_prefix(workload)?.split_whitespace();
        let mut number = || words.next()?.parse().ok();
        let (packets_per_us, dma_gb_per_s) = (number()?, number()?);
        let each = HexRates {
            packets_per_us,
            dma_gb_per_s,
            ..chip
        };
        let is_beside = words.next()? == "beside";
        Some(Rates { each, is_beside })
    });
    std::array::from_fn(|_| {
        let rates = found.next();
        rates.unwrap_or_else(|| unreachable!("the table has two rows for each: a test reads them"))
    })
}

/// Returns the published speeds of a model on a chip.
///
/// - `model`: its architecture, layers, and elements of a token between layers
/// - `chip`: `v75` for a Hexagon, `rk3588` for a Rockchip
pub fn speeds<'a>(model: (&'a str, usize, usize), chip: &str) -> impl Iterator<Item = Speed<'a>> {
    let (name, layers, embed) = model;
    let wanted = format!("{name} {layers} {embed} {chip} ");
    lines("speed").filter_map(move |line| {
        let mut words = line.strip_prefix(&wanted)?.splitn(4, ' ');
        let mut word = || words.next();
        Some(Speed {
            weight: word()?,
            prompt: word()?,
            generation: word()?,
            source: word()?,
        })
    })
}
