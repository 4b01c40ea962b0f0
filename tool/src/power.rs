//! Power while a device computes, from the kernel's or a program's readings.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::ToolError;

/// The prefix of a program's source.
const PROGRAM: &str = "command:";

/// Time between two readings; sensors on boards average over about as long.
const INTERVAL: Duration = Duration::from_millis(20);

/// A source of power, and the conversion of its numbers to watts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PowerSource {
    /// Files whose product is the power, times `10^exponent`.
    Files { paths: Vec<PathBuf>, exponent: i32 },
    /// A shell's command that prints watts.
    Program(String),
}

/// Files of a folder: names, and the power of ten of their product in watts.
// SOURCE: Documentation/ABI/testing/sysfs-class-hwmon (power: microwatts, curr: milliamperes, in:
// millivolts) and sysfs-class-power (power_now: microwatts, current_now: microamperes, voltage_now:
// microvolts) of Linux 6.12.
const KNOWN: [(&[&str], i32); 5] = [
    (&["power1_average"], -6),
    (&["power1_input"], -6),
    (&["curr1_input", "in1_input"], -6),
    (&["power_now"], -6),
    (&["current_now", "voltage_now"], -12),
];

impl PowerSource {
    /// Finds the power source that `text` names, and reads it once.
    ///
    /// # Errors
    /// An error text with the source and its fault.
    pub fn open(text: &str) -> Result<Self, ToolError> {
        let source = match text.strip_prefix(PROGRAM) {
            Some(program) => Self::Program(program.to_owned()),
            None => Self::files(Path::new(text))?,
        };
        source.watts()?;
        Ok(source)
    }

    fn files(path: &Path) -> Result<Self, ToolError> {
        if !path.is_dir() {
            let paths = vec![path.to_owned()];
            return Ok(Self::Files {
                paths,
                exponent: -6,
            });
        }
        let has = |names: &[&str]| names.iter().all(|name| path.join(name).exists());
        let known = KNOWN.iter().find(|(names, _)| has(names));
        let (names, exponent) = known.ok_or_else(|| {
            let names: Vec<String> = KNOWN.iter().map(|(names, _)| names.join(" and ")).collect();
            format!("{}: none of the files {}", path.display(), names.join(", "))
        })?;
        let paths = names.iter().map(|name| path.join(name)).collect();
        Ok(Self::Files {
            paths,
            exponent: *exponent,
        })
    }

    /// Returns the power now, in watts. A battery that is discharged may count downwards.
    fn watts(&self) -> Result<f64, ToolError> {
        match self {
            Self::Files { paths, exponent } => {
                let mut product = 10f64.powi(*exponent);
                for path in paths {
                    let text = fs::read_to_string(path)
                        .map_err(|error| format!("{}: {error}", path.display()))?;
                    product *= number(&text, &path.display().to_string())?;
                }
                Ok(product.abs())
            }
            Self::Program(program) => {
                let run = Command::new("sh")
                    .args(["-c", program])
                    .stdin(Stdio::null())
                    .output();
                let run = run.map_err(|error| format!("{PROGRAM}{program}: {error}"))?;
                if !run.status.success() {
                    return Err(format!("{PROGRAM}{program}: {}", run.status).into());
                }
                number(
                    &String::from_utf8_lossy(&run.stdout),
                    &format!("{PROGRAM}{program}"),
                )
            }
        }
    }

    /// Runs `work`, and returns its result with the mean power in watts during it.
    ///
    /// # Errors
    /// An error of `work`, or a text if the source cannot be read any more.
    pub fn mean_while<T>(
        &self,
        work: impl FnOnce() -> Result<T, ToolError>,
    ) -> Result<(T, f64), ToolError> {
        self.metered(&Meter::default(), work)
    }

    /// Runs `work` while `meter` counts joules, and returns its result with the mean power in
    /// watts.
    ///
    /// # Errors
    /// An error of `work`, or a text if the source cannot be read any more.
    pub fn metered<T>(
        &self,
        meter: &Meter,
        work: impl FnOnce() -> Result<T, ToolError>,
    ) -> Result<(T, f64), ToolError> {
        let is_done = AtomicBool::new(false);
        // Set here instead of in the thread, which may start later than the work.
        let mut last = Instant::now();
        thread::scope(|scope| {
            let is_done = &is_done;
            let sampler = scope.spawn(move || {
                let (mut sum, mut count) = (0.0, 0.0);
                loop {
                    // Read first, so that the last sample is taken after the work has ended.
                    let is_last = is_done.load(Ordering::Relaxed);
                    let watts = self.watts().map_err(|error| {
                        meter.fail();
                        error.to_string()
                    })?;
                    let now = Instant::now();
                    meter.add(watts * (now - last).as_secs_f64());
                    last = now;
                    sum += watts;
                    count += 1.0;
                    if is_last {
                        return Ok::<f64, String>(sum / count);
                    }
                    thread::sleep(INTERVAL);
                }
            });
            // Dropped even if the work panics, because the scope waits for the sampling thread.
            let end = EndOfWork(is_done);
            let done = work();
            drop(end);
            let watts = sampler
                .join()
                .map_err(|_| "the thread that reads power died")?;
            Ok((done?, watts?))
        })
    }
}

/// Reports, when it is dropped, that the work has ended.
struct EndOfWork<'a>(&'a AtomicBool);

impl Drop for EndOfWork<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Counts energy.
#[derive(Debug)]
pub struct Meter(Mutex<Option<f64>>);

impl Default for Meter {
    fn default() -> Self {
        Self(Mutex::new(Some(0.0)))
    }
}

impl Meter {
    fn joules(&self) -> MutexGuard<'_, Option<f64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, more: f64) {
        if let Some(joules) = &mut *self.joules() {
            *joules += more;
        }
    }

    /// Ends the counting: the source cannot be read any more.
    fn fail(&self) {
        *self.joules() = None;
    }

    /// Returns the joules since the last call; none after the source failed.
    pub fn take(&self) -> Option<f64> {
        self.joules().as_mut().map(std::mem::take)
    }
}

fn number(text: &str, source: &str) -> Result<f64, ToolError> {
    let text = text.trim();
    let number = text.parse().ok().filter(|number: &f64| number.is_finite());
    number.ok_or_else(|| format!("{source}: {text:?} is no number").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str, files: &[(&str, &str)]) -> PathBuf {
        let folder =
            std::env::temp_dir().join(format!("ggml-npu-power-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for (name, text) in files {
            fs::write(folder.join(name), text).unwrap();
        }
        folder
    }

    fn watts(folder: &Path) -> f64 {
        PowerSource::open(folder.to_str().unwrap())
            .unwrap()
            .watts()
            .unwrap()
    }

    #[test]
    fn units_are_those_of_the_kernel_s_files() {
        let hwmon = folder("hwmon", &[("power1_input", "5250000\n")]);
        assert!((watts(&hwmon) - 5.25).abs() < 1e-9);
        assert!((watts(&hwmon.join("power1_input")) - 5.25).abs() < 1e-9);
        let parts = folder("parts", &[("curr1_input", "500"), ("in1_input", "12000")]);
        assert!((watts(&parts) - 6.0).abs() < 1e-9);
        let battery = folder(
            "battery",
            &[("current_now", "-1500000"), ("voltage_now", "4000000")],
        );
        assert!((watts(&battery) - 6.0).abs() < 1e-9);
        for folder in [hwmon, parts, battery] {
            fs::remove_dir_all(folder).unwrap();
        }
    }

    #[test]
    fn the_mean_is_that_of_the_time_of_the_work() {
        let folder = folder("mean", &[("power_now", "2000000")]);
        let source = PowerSource::open(folder.to_str().unwrap()).unwrap();
        let meter = Meter::default();
        let next_reading = || {
            let deadline = Instant::now() + Duration::from_secs(60);
            while meter.take().unwrap() <= 0.0 {
                assert!(Instant::now() < deadline, "nothing is read");
                thread::sleep(INTERVAL / 20);
            }
        };
        let work = || {
            next_reading();
            // Written elsewhere and renamed, so that the reading thread never finds the file empty.
            let next = folder.join("next");
            fs::write(&next, "4000000")?;
            fs::rename(next, folder.join("power_now"))?;
            // A reading may have begun before the change, so wait for several.
            (0..3).for_each(|_| next_reading());
            Ok(7)
        };
        let (seven, watts) = source.metered(&meter, work).unwrap();
        assert_eq!(seven, 7);
        assert!(2.0 < watts && watts < 4.0, "{watts}");
        meter.take();
        let began = Instant::now();
        let wait = || {
            thread::sleep(10 * INTERVAL);
            Ok(())
        };
        source.metered(&meter, wait).unwrap();
        let most = 4.0 * began.elapsed().as_secs_f64();
        let least = 4.0 * (10 * INTERVAL).as_secs_f64();
        let joules = meter.take().unwrap();
        assert!((least..=most).contains(&joules), "{joules}");
        assert!(meter.take().unwrap() < f64::EPSILON);
        // If no energy was measured, the result is an error, not 0 J.
        let lost = source.metered(&meter, || {
            fs::remove_dir_all(&folder)?;
            let deadline = Instant::now() + Duration::from_secs(60);
            while meter.take().is_some() {
                assert!(Instant::now() < deadline, "it goes on counting");
                thread::sleep(INTERVAL / 20);
            }
            Ok(())
        });
        assert!(lost.unwrap_err().to_string().contains("power_now"));
    }

    #[test]
    #[should_panic(expected = "of the work")]
    fn work_that_panics_ends_the_readings() {
        let source = PowerSource::open("command:echo 1").unwrap();
        let _ = source.mean_while(|| -> Result<(), ToolError> { panic!("of the work") });
    }

    #[test]
    fn what_gives_no_watts_is_refused_by_its_name() {
        let empty = folder("empty", &[("uevent", "")]);
        for (source, words) in [
            (empty.to_str().unwrap(), "none of the files power1_average"),
            ("/nowhere/power1_input", "/nowhere/power1_input: "),
            (
                "command:echo lots",
                "command:echo lots: \"lots\" is no number",
            ),
            ("command:exit 3", "command:exit 3: exit status: 3"),
            ("command:echo NaN", "is no number"),
        ] {
            let error = PowerSource::open(source).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        fs::remove_dir_all(empty).unwrap();
    }
}
