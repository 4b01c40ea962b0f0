//! The table of variables. [`Config`], its documentation, the texts of errors and
//! `docs/guide/variables.md` come from it.

use std::path::PathBuf;
use std::time::Duration;

use hexagon_ops::wire::Power;
use log::LevelFilter;
use rknpu_ops::calibrate::Method;
use rknpu_ops::sim::Coherence;

use super::rules::{self, Rules};
use super::settings::{BadSettings, Settings};
use super::values::{
    self, ACTIVATIONS, CALIBRATIONS, COHERENCES, HEX_THREADS, KEEPS, LEVELS, MEMORIES_MIB,
    NEWER_GGMLS, PACK_VERIFIES, POWERS, REPACKS, RKNNS, SESSIONS, TIMEOUTS_S, chip, list, number,
    one_of, path, quoted, span, words,
};
use super::{ActivationBits, Driving, Faults, Repack, SimChip};
use crate::error::{Error, Result};
use crate::ggml_version::NewerGgml;
use crate::rockchip::caps::{Cores, RkCaps};

/// A variable, as the documentation shows it.
#[derive(Debug)]
pub struct Variable {
    /// The name of the variable.
    pub name: &'static str,
    /// The values that are understood, in Markdown.
    pub allowed: fn() -> String,
    /// The value if the variable is not set, in Markdown.
    pub default: fn() -> String,
    /// The variable's effect, in Markdown.
    pub meaning: &'static str,
}

/// Variables that belong together.
#[derive(Debug)]
pub struct Chapter {
    /// The heading.
    pub title: &'static str,
    /// A sentence below the heading, in Markdown.
    pub opening: &'static str,
    /// The variables.
    pub variables: &'static [Variable],
}

/// Reads the value of a variable.
///
/// - `parse`: returns the value, or the fault of the text
/// - `allowed`: as [`Variable::allowed`]
fn read<T>(
    variable: &'static str,
    value: Option<String>,
    default: T,
    parse: impl FnOnce(&str) -> std::result::Result<T, String>,
    allowed: fn() -> String,
) -> Result<T> {
    let Some(value) = value else {
        return Ok(default);
    };
    parse(&value).map_err(|reason| Error::Config {
        variable,
        value,
        reason,
        allowed: allowed().replace('`', ""),
    })
}

/// Expands rows to [`Config`], [`Config::parse`] and [`CHAPTERS`].
///
/// A row is the variable's meaning, its field, the field's value if the variable is not set, and
/// how text becomes a value; then its name, allowed values and default for the documentation.
macro_rules! variables {
    ($($title:literal, $opening:literal { $(
        $(#[doc = $meaning:literal])+
        $field:ident: $type:ty = $default:expr, $parse:expr;
        $name:literal, $allowed:expr, default $shown:expr;
    )+ })+) => {
        /// The user's settings: a field for each variable, and the file of settings.
        #[derive(Debug)]
        pub struct Config {
            $($(
                #[doc = concat!("`", $name, "`")]
                #[doc = ""]
                $(#[doc = $meaning])+
                pub $field: $type,
            )+)+
            /// The file's values, or the reason why it cannot be read. Only devices with settings
            /// use it.
            pub settings: std::result::Result<Settings, BadSettings>,
        }

        impl Config {
            /// Reads each variable through `get`.
            ///
            /// # Errors
            /// `Config` for the first value that is not understood.
            pub(super) fn parse(
                get: impl Fn(&'static str) -> Option<String>,
                settings: std::result::Result<Settings, BadSettings>,
            ) -> Result<Self> {
                Ok(Self {
                    $($($field: read($name, get($name), $default, $parse, || $allowed.into())?,)+)+
                    settings,
                })
            }
        }

        /// All variables.
        pub static CHAPTERS: &[Chapter] = &[$(Chapter {
            title: $title,
            opening: $opening,
            variables: &[$(Variable {
                name: $name,
                allowed: || $allowed.into(),
                default: || $shown.into(),
                meaning: concat!($($meaning),+),
            }),+],
        }),+];
    };
}

variables! {
    "Devices", "" {
        /// The devices to keep, by their names in ggml. One that is not there is a warning.
        devices: Option<Vec<String>> = None, |text| Ok(Some(list(text)));
        "GGML_RUST_NPU_DEVICES", "names, such as `RKNPU0,HEX0`", default "all";

        /// The log lines to pass on. `debug` shows the modelled cost of each graph on Hexagon, and
        /// the loader's message if a library is not found; `trace` each node that a device leaves
        /// to others, and why.
        log: LevelFilter = LevelFilter::Info, |text| one_of(&LEVELS, &text.to_lowercase());
        "GGML_RUST_NPU_LOG", words(&LEVELS), default "`info`";

        /// The plugin's answer to a program whose ggml is newer than it knows. `probe` checks
        /// everything about that ggml that can be checked, and uses it after one warning if all
        /// checks agree; `strict` refuses it.
        ggml: NewerGgml = NewerGgml::Probe, |text| one_of(&NEWER_GGMLS, text);
        "GGML_RUST_NPU_GGML", words(&NEWER_GGMLS), default "`probe`";

        /// The file of settings, which `ggml-npu bench --write-config` writes. Its lines look like
        /// `min_m.rk3588 = 5` (`min_m.rk3588.simulated`: for the stand-in only). Variables override
        /// it. If the named file is missing or a line is not understood, the backend reports one
        /// error and offers no Rockchip device.
        settings_file: Option<PathBuf> = None, path;
        "GGML_RUST_NPU_CONFIG", "a path",
        default "`ggml-rust-npu.conf` in `$XDG_CONFIG_HOME` or `~/.config`, if there is one";

        /// `trace.json` gets one timeline of all devices, which [Perfetto](https://ui.perfetto.dev)
        /// shows and `ggml-npu trace summary` sums up: measured and modelled times of [each
        /// operation](programs.md#where-the-time-goes). Another name, such as `trace.csv`, gets a
        /// table of each Hexagon device's commands as `trace.HEX0.csv`. Its columns are node,
        /// operation, shape, modelled packets, bytes, tile products and time, and the times that
        /// the DSP and the host measured. *Modelled* values come from counted packets and assumed
        /// rates (`HexRates` in the chip table). On Hexagon each command is submitted alone, which
        /// is slow. `graphs.commands` gets each graph of a simulated Hexagon device, which records
        /// its commands and computes nothing: `make models` counts them.
        trace: Option<PathBuf> = None, path;
        "GGML_RUST_NPU_TRACE", "a path, such as `trace.json`", default "none";
    }

    "Weights", "[Packing before loading](quantizing.md#packing-before-loading) explains pack files." {
        /// Pack files of `ggml-npu repack`. Weights in them are not packed again when a model is
        /// loaded.
        pack: Option<PathBuf> = None, path;
        "GGML_RUST_NPU_PACK", "a file or a folder", default "none";

        /// Compares weights with the pack's source by sampled pages, or by all of their bytes.
        pack_full: bool = false, |text| one_of(&PACK_VERIFIES, text);
        "GGML_RUST_NPU_PACK_VERIFY", words(&PACK_VERIFIES), default "`sampled`";

        /// Packs weights when they are loaded, or [at first
        /// use](encoders.md#weights-in-plain-memory) if they lie in plain memory (`weights`), or,
        /// on Hexagon, at each use (`off`). `always` is for upstream's tests, and for [encoders
        /// whose weights are to take memory once](encoders.md#weights-in-plain-memory). It puts
        /// everything into packed memory on Hexagon, where operations that are not multiplications
        /// unpack their operands first. On Rockchip it has the NPU compute what the CPU computes
        /// otherwise: products of operands that are no weights, and attention of a few tokens.
        repack: Repack = Repack::Weights, |text| one_of(&REPACKS, text);
        "GGML_RUST_NPU_REPACK", words(&REPACKS), default "`weights`";
    }

    "Rockchip", "The pages for Rockchip and quantizing explain [rules](rockchip.md#rules), [weights that\n\
        packing enlarges](rockchip.md#what-happens-to-a-weight) and [timing](quantizing.md#timing)." {
        /// The chip to assume, instead of the one in the device tree.
        chip: Option<&'static RkCaps> = None, |text| chip(text).map(Some);
        "GGML_RUST_NPU_CHIP", quoted(&values::rockchips()), default "the device tree's";

        /// The NPU cores to use, for chips with one switched off (RK3582, RK3583).
        cores: Option<Cores> = None,
            |text| Cores::parse(text).map(Some).ok_or_else(|| "no list of cores".into());
        "GGML_RUST_NPU_CORES", "numbers of cores, such as `0,1`", default "all that the chip has (RK3583: 2)";

        /// The NPU is driven by the vendor's library (`vendor`), or on an RK3588 by [our own
        /// command streams](rockchip.md#without-the-vendors-library) (`direct`), which no board has
        /// run yet. `auto` uses the library, or streams if no library can be loaded.
        rknn: Driving = Driving::Vendor, |text| one_of(&RKNNS, text);
        "GGML_RUST_NPU_RKNN", words(&RKNNS), default "`vendor`";

        /// The vendor's library.
        rknn_lib: Option<PathBuf> = None, path;
        "GGML_RUST_NPU_RKNN_LIB", "a path", default "the system's `librknnrt.so`";

        /// The arithmetic of weights by name. Patterns are regular expressions, and the first one
        /// that matches decides.
        rules: Rules = Rules::default(), Rules::parse;
        "GGML_RUST_NPU_RULES",
        format!("`pattern=choice,…`; choices: {}", quoted(&rules::choices())),
        default "F16: `fp16`, quantized: `int8`";

        /// Clips INT4 weights.
        calibration: Method = Method::default(), |text| one_of(&CALIBRATIONS, text);
        "GGML_RUST_NPU_CALIBRATION", words(&CALIBRATIONS), default "`mse`";

        /// The smallest M (rows, that is tokens in a batch) that the NPU multiplies. ggml's CPU
        /// backend computes smaller ones from the same weights. `ggml-npu bench --cpu` finds the
        /// value on a board; `benches/crossover.c` does so within ggml. [`Config::min_m()`]
        /// considers the file, too.
        min_m: Option<usize> = None, values::rows;
        "GGML_RUST_NPU_MIN_M", format!("1 (all on the NPU) to {}", values::MIN_M_MAX),
        default "the settings file's, or 1, except few rows with weights that packing enlarges";

        /// `on` keeps the bytes of each weight in addition to its packed form, so that it can be
        /// read. `off` frees them once the weight is packed: then it cannot be read, and the CPU
        /// cannot compute with it (so not with `MIN_M` above 1).
        keep: Option<bool> = None, |text| one_of(&KEEPS, text).map(Some);
        "GGML_RUST_NPU_KEEP", words(&KEEPS), default "keeps the bytes that the CPU computes with";
    }

    "Hexagon", "" {
        /// The vendor's library.
        cdsprpc_lib: Option<PathBuf> = None, path;
        "GGML_RUST_NPU_CDSPRPC_LIB", "a path", default "the system's `libcdsprpc.so`, then `libcdsprpc.so.1`, then on Android `/vendor/lib64/libcdsprpc.so`";

        /// The number of devices that each compute DSP appears as, each with its own address space.
        hex_sessions: u32 = 1, |text| number(&SESSIONS, text);
        "GGML_RUST_NPU_HEX_SESSIONS", span(&SESSIONS), default "1";

        /// The most threads that compute on each DSP. A simulated NPU has this many vector units,
        /// and computes on threads of this machine's CPU.
        hex_threads: Option<u32> = None, values::threads;
        "GGML_RUST_NPU_HEX_THREADS", span(&HEX_THREADS),
        default "one for each vector unit; 1 of a simulated NPU";

        /// Bits of activations in products of one token with quantized weights; 8 bits are for two
        /// tokens, too. 16 are as exact as F16; `auto` uses 16 where they are not slower at the
        /// device's measured speed, because memory is the limit. A simulated NPU chooses like a
        /// chip of average speed with four vector units.
        hex_act: ActivationBits = ActivationBits::Auto, |text| one_of(&ACTIVATIONS, text);
        "GGML_RUST_NPU_HEX_ACT", words(&ACTIVATIONS), default "`auto`";

        /// The power that each DSP's library requests while a program uses the device: the highest
        /// clocks (`burst`), clocks that follow the load (`balanced`), or low ones that rise late
        /// (`saver`).
        power: Power = Power::Burst, |text| one_of(&POWERS, text);
        "GGML_RUST_NPU_POWER", words(&POWERS), default "`burst`";

        /// The time without a sign of progress after which the NPU counts as lost. A graph may run
        /// longer than this, but a single command may not.
        timeout: Duration = values::DEFAULT_TIMEOUT, values::timeout;
        "GGML_RUST_NPU_TIMEOUT", format!("{}, in seconds", span(&TIMEOUTS_S)),
        default values::DEFAULT_TIMEOUT.as_secs().to_string();
    }

    "Simulation", "The [stand-ins](../internals/stand-ins.md#faults) list the functions and codes of faults." {
        /// The chips to simulate. Real ones are not looked for then.
        sim: Vec<SimChip> = Vec::new(), values::sim;
        "GGML_RUST_NPU_SIM", format!("a list of {}", quoted(&values::chips())), default "real devices, or none";

        /// Calls that fail: `rknn_matmul_run:3=-1` (the third), `3+` (from the third),
        /// `rknn_matmul_run:M2=0` (those with M = 2 give wrong numbers),
        /// `remote_handle64_open:1=0x80000406`, and `dsp:n=hang`, `lost`, `corrupt`, `badring` or
        /// `wrong` at the n-th submission.
        faults: Faults = Faults::default(), values::faults;
        "GGML_RUST_NPU_SIM_FAULTS",
        "`function:n=code,…` (`n` fails the n-th call, `n+` that one and all later ones), or `rknn_matmul_run:M<rows>=0`",
        default "none";

        /// With `strict`, the CPU and the chip each have a cache: one sees the other's writes only
        /// after a cache operation.
        coherence: Coherence = Coherence::Relaxed, |text| one_of(&COHERENCES, text);
        "GGML_RUST_NPU_SIM_COHERENCE", words(&COHERENCES), default "`relaxed`";

        /// The memory of the machine that simulated devices are in, in MiB. It is reported to
        /// programs in place of this machine's memory, and llama.cpp's `-fit` makes models fit into
        /// it.
        sim_memory_mib: Option<u32> = None, values::memory_mib;
        "GGML_RUST_NPU_SIM_MEMORY", format!("{}, in MiB", span(&MEMORIES_MIB)), default "this machine's";

        /// A file in place of the node of the simulated Rockchip NPU: processes with the same file
        /// share one NPU, as they do on a board. It is created if it is missing. Without it each
        /// process has a separate NPU.
        sim_node: Option<PathBuf> = None, path;
        "GGML_RUST_NPU_SIM_NODE", "a path", default "none";

        /// The version that the simulated librknnrt claims.
        sim_api_version: Option<String> = None, |text| Ok(Some(text.into()));
        "GGML_RUST_NPU_SIM_API_VERSION", "a version", default "that of SDK 2.3.2";
    }
}

/// Returns the names of all variables.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    let variables = CHAPTERS.iter().flat_map(|chapter| chapter.variables);
    variables.map(|variable| variable.name)
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::path::Path;

    use super::*;

    const OPENING: &str = "\
# Environment variables

They are read once, when llama.cpp loads the backend or `ggml-npu` starts. An empty value counts as
not set. A value that is not understood, or a variable with the prefix `GGML_RUST_NPU_` that does
not exist, is a log line that names what is allowed.

This page is made from the table in `src/config/variables.rs`.
";

    /// The text of `docs/guide/variables.md`.
    fn page() -> String {
        let mut page = OPENING.to_owned();
        for chapter in CHAPTERS {
            write!(page, "\n## {}\n\n", chapter.title).unwrap();
            if !chapter.opening.is_empty() {
                write!(page, "{}\n\n", chapter.opening).unwrap();
            }
            page += "| variable | values | default | meaning |\n|---|---|---|---|\n";
            for variable in chapter.variables {
                let (allowed, default) = ((variable.allowed)(), (variable.default)());
                let (name, meaning) = (variable.name, variable.meaning.trim());
                // Links to items work only in rustdoc, so the text is cut before the first one.
                let meaning = meaning.split(" [`").next().unwrap();
                writeln!(page, "| `{name}` | {allowed} | {default} | {meaning} |").unwrap();
            }
        }
        page
    }

    #[test]
    fn the_page_of_variables_is_up_to_date() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guide/variables.md");
        let want = page();
        if std::env::var_os("UPDATE_VARIABLES").is_some() {
            std::fs::write(&path, &want).unwrap();
        }
        let have = std::fs::read_to_string(&path).unwrap();
        assert!(
            have == want,
            "docs/guide/variables.md is stale: UPDATE_VARIABLES=1 cargo test --lib variables"
        );
    }

    fn with(name: &str, value: &str) -> Result<Config> {
        Config::parse(
            |asked| (asked == name).then(|| value.to_owned()),
            Ok(Settings::default()),
        )
    }

    /// Returns the words between backquotes if there is nothing else but commas and `opening`.
    fn only_words<'a>(text: &'a str, opening: &str) -> Option<Vec<&'a str>> {
        let (between, words): (Vec<_>, Vec<_>) =
            (text.split('`').enumerate()).partition(|(index, _)| index % 2 == 0);
        let is_separator = |text: &str| ["", ", ", opening].contains(&text);
        let is_list = !words.is_empty() && between.iter().all(|(_, text)| is_separator(text));
        is_list.then(|| words.into_iter().map(|(_, word)| word).collect())
    }

    #[test]
    fn all_words_that_are_said_to_be_allowed_are_understood_and_another_is_not() {
        let mut lists = 0;
        for variable in CHAPTERS.iter().flat_map(|chapter| chapter.variables) {
            let allowed = (variable.allowed)();
            for word in only_words(&allowed, "a list of ").into_iter().flatten() {
                assert!(
                    with(variable.name, word).is_ok(),
                    "{}={word}",
                    variable.name
                );
                let another = with(variable.name, &format!("{word}?"));
                let text = another.expect_err(variable.name).to_string();
                assert!(text.contains(&allowed.replace('`', "")), "{text}");
                lists += 1;
            }
        }
        assert!(lists > 20, "{lists} words");
    }

    #[test]
    fn defaults_are_what_the_documentation_says() {
        let unset = format!("{:?}", with("", "").unwrap());
        let mut defaults = 0;
        for variable in CHAPTERS.iter().flat_map(|chapter| chapter.variables) {
            let default = (variable.default)();
            let word = default.trim_matches('`');
            if word.parse::<u32>().is_ok() || only_words(&default, "").is_some() {
                let set = with(variable.name, word).unwrap();
                assert_eq!(format!("{set:?}"), unset, "{}={word}", variable.name);
                defaults += 1;
            }
        }
        assert_eq!(defaults, 11);
    }
}
