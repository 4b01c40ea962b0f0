//! Any text as variables, rules, fault lists and as the settings file: it is understood, or refused
//! with a message that names the fault. A setting that is understood must have its documented
//! meaning.
//!
//! ```text
//! input = kind, then
//!   0  the file of settings
//!   1  rules, a line feed, names of tensors on lines
//!   _  { number of a variable, value up to a byte 255 }
//! ```
#![no_main]

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use ggml_rust_npu::config::rules::Rules;
use ggml_rust_npu::config::settings::{Setting, Settings};
use ggml_rust_npu::config::{Config, known_variables, unknown_variables};
use ggml_rust_npu::rockchip::caps;
use ggml_rust_npu_fuzz::Input;
use libfuzzer_sys::fuzz_target;

/// Settings, each with a value that every chip may have.
const SETTINGS: [(Setting, usize); 3] = [
    (Setting::MinM, 7),
    (Setting::KMaxInt8, 512),
    (Setting::KMaxFp16, 512),
];

/// Returns a value for each setting and chip, of the device and of its stand-in.
fn values_of(settings: &Settings) -> Vec<Option<usize>> {
    let chips = caps::ALL.iter().map(|caps| caps.soc.name());
    chips
        .flat_map(|chip| SETTINGS.map(|(setting, _)| (setting, chip)))
        .flat_map(|(setting, chip)| [false, true].map(|sim| settings.get(setting, chip, sim)))
        .collect()
}

/// If a text is understood, it is still understood after a chip's setting was written to it, and
/// nothing else changes.
fn settings(text: &str) {
    let Ok(settings) = Settings::parse(text) else {
        return;
    };
    let chips = caps::ALL.iter().map(|caps| caps.soc.name());
    let keys = chips.flat_map(|chip| SETTINGS.map(|(setting, value)| (setting, chip, value)));
    for (at, (setting, chip, value)) in keys.enumerate() {
        let changed = Settings::with(text, setting, chip, true, value);
        let changed = Settings::parse(&changed).expect("a file that was understood");
        let mut want = values_of(&settings);
        want[2 * at + 1] = Some(value);
        assert_eq!(values_of(&changed), want);
    }
}

/// A rule that decides must be one of the given rules.
fn rules(text: &str) {
    let (list, names) = text
        .split_once('\n')
        .unwrap_or((text, "blk.0.ffn_up.weight"));
    let Ok(rules) = Rules::parse(list) else {
        return;
    };
    for name in names.lines() {
        if let Some(choice) = rules.choice(name) {
            assert!(rules.ask_for(choice));
        }
    }
}

fn variables(input: &mut Input) {
    let names = known_variables();
    let names: Vec<&str> = names.split(", ").collect();
    let mut values = HashMap::new();
    while !input.is_empty() {
        let name = input.one_of(&names);
        let value = OsString::from_vec(input.until(255).to_vec());
        // Settings files of the machine are not part of this target.
        if !name.ends_with("_CONFIG") {
            values.insert(name, value);
        }
    }
    assert!(unknown_variables(values.keys().map(|name| (*name).to_owned())).is_empty());
    match Config::from_os_lookup(|name| values.get(name).cloned()) {
        Ok(config) => {
            for caps in caps::ALL {
                let rows = config.min_m(caps.soc.name()).expect("no file of settings");
                assert!(config.min_m.is_none_or(|said| said == rows));
                let narrow = config.min_m_narrow(caps.soc.name());
                assert!(narrow.expect("no file of settings") >= rows);
            }
            assert!(values.values().all(|value| value.to_str().is_some()));
        }
        Err(error) => {
            let text = error.to_string();
            let named = values.keys().find(|name| text.starts_with(**name));
            assert!(named.is_some(), "{text} names none of {values:?}");
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    match input.byte() {
        0 => settings(&String::from_utf8_lossy(input.rest())),
        1 => rules(&String::from_utf8_lossy(input.rest())),
        _ => variables(&mut input),
    }
});
