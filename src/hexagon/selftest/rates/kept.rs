//! The file in which measured rates are kept: `ggml-rust-npu/rates` in `$XDG_CACHE_HOME` or
//! `~/.cache`. It may be deleted.
//!
//! ```text
//! hexagon-v75 threads=4 power=0 packets_per_us=412.5 gb_per_s=44.1
//! ```

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use hexagon_ops::wire::Power;

use crate::hexagon::caps::HexRates;

/// The identity of measured rates: a session with other threads or other clocks has other rates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key(String);

impl Key {
    /// Describes a session of a chip.
    #[must_use]
    pub fn new(chip: &str, threads: u32, power: Power) -> Self {
        // CAST: a C-like enumeration.
        Self(format!("{chip} threads={threads} power={} ", power as u32))
    }
}

/// Returns the file of this user; `None` if the user has no folder for it.
#[must_use]
pub fn file() -> Option<PathBuf> {
    let folder = |name| {
        let folder = std::env::var_os(name).map(PathBuf::from);
        folder.filter(|folder| folder.is_absolute())
    };
    let cache = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|it| it.join(".cache")))?;
    Some(cache.join("ggml-rust-npu").join("rates"))
}

/// Returns the kept rates, and those of `others` for rates that are not measured.
#[must_use]
pub fn read(file: &Path, key: &Key, others: HexRates) -> Option<HexRates> {
    let text = fs::read_to_string(file).ok()?;
    let values = text.lines().find_map(|line| line.strip_prefix(&*key.0))?;
    let value = |name: &str| {
        let mut words = values.split_whitespace();
        let value = words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))?;
        value.parse().ok()
    };
    Some(HexRates {
        packets_per_us: value("packets_per_us")?,
        dma_gb_per_s: value("gb_per_s")?,
        ..others
    })
    .filter(super::is_plausible)
}

/// Keeps rates in place of those of the same key.
///
/// # Errors
/// An error of the system, if the file cannot be written; it is unchanged then.
pub fn write(file: &Path, key: &Key, rates: &HexRates) -> std::io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder)?;
    let mut text = String::new();
    let known = fs::read_to_string(file).unwrap_or_default();
    let others = known.lines().filter(|line| !line.starts_with(&*key.0));
    others.for_each(|line| text = std::mem::take(&mut text) + line + "\n");
    let (packets, bytes) = (rates.packets_per_us, rates.dma_gb_per_s);
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{}packets_per_us={packets:.1} gb_per_s={bytes:.2}",
        key.0
    );
    let mut part = tempfile::NamedTempFile::new_in(folder)?;
    part.write_all(text.as_bytes())?;
    part.persist(file)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hexagon::caps;

    fn rates(packets_per_us: f64) -> HexRates {
        HexRates {
            packets_per_us,
            dma_gb_per_s: 44.25,
            ..caps::FITTED
        }
    }

    #[test]
    fn each_session_has_its_own_rates_and_a_damaged_line_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder
            .path()
            .join("a folder that is not there")
            .join("rates");
        let [four, one] = [4, 1].map(|threads| Key::new("hexagon-v75", threads, Power::Burst));
        assert_eq!(read(&file, &four, caps::FITTED), None);
        write(&file, &four, &rates(400.0)).unwrap();
        write(&file, &one, &rates(500.0)).unwrap();
        write(&file, &four, &rates(412.5)).unwrap();
        assert_eq!(read(&file, &four, caps::FITTED), Some(rates(412.5)));
        assert_eq!(read(&file, &one, caps::FITTED), Some(rates(500.0)));
        let saver = Key::new("hexagon-v75", 4, Power::Saver);
        assert_eq!(read(&file, &saver, caps::FITTED), None);
        for damaged in [
            "packets_per_us=many gb_per_s=1",
            "packets_per_us=400",
            "packets_per_us=nan gb_per_s=40",
        ] {
            fs::write(&file, format!("{}{damaged}\n", four.0)).unwrap();
            assert_eq!(read(&file, &four, caps::FITTED), None, "{damaged}");
        }
    }
}
