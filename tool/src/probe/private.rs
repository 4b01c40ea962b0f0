//! Keeps names and folders of people out of a report.

/// The words that are replaced.
#[derive(Debug)]
pub(super) struct Private {
    /// Home folders.
    homes: Vec<String>,
    /// Names of the user and the machine.
    names: Vec<String>,
}

impl Default for Private {
    fn default() -> Self {
        let variable = |name: &str| {
            let value = std::env::var_os(name)?;
            Some(value.to_string_lossy().into_owned())
        };
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
        let homes = variable("HOME").into_iter();
        let names = ["USER", "LOGNAME", "HOSTNAME"].map(variable);
        Self {
            // "/" is the home folder of services, and would match every path.
            homes: homes.filter(|home| home.len() > 1).collect(),
            names: (names.into_iter().flatten().chain(host))
                .map(|name| name.trim().to_owned())
                .filter(|name| name.len() > 2)
                .collect(),
        }
    }
}

/// Folders whose next component is a name.
const ABOVE_HOMES: [&str; 3] = ["/home/", "/Users/", "/data/data/"];

impl Private {
    /// Replaces home folders by `~`, and names of the user and the machine by `?`.
    pub(super) fn hide(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for home in &self.homes {
            text = text.replace(home.as_str(), "~");
        }
        for above in ABOVE_HOMES {
            while let Some(start) = text.find(above) {
                let name = &text[start + above.len()..];
                let len = name
                    .find(|c: char| c == '/' || c.is_whitespace())
                    .unwrap_or(name.len());
                text.replace_range(start..start + above.len() + len, "~");
            }
        }
        for name in &self.names {
            text = without_word(&text, name);
        }
        text
    }
}

/// Replaces `word` where no letter or digit is next to it.
fn without_word(text: &str, word: &str) -> String {
    let is_part = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
    let (mut out, mut rest) = (String::new(), text);
    while let Some(start) = rest.find(word) {
        let (before, after) = (&rest[..start], &rest[start + word.len()..]);
        let previous = before.chars().last().or(out.chars().last());
        let inside = is_part(previous) || is_part(after.chars().next());
        out += before;
        out += if inside { word } else { "?" };
        rest = after;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn homes_and_names_are_hidden_and_words_around_them_stay() {
        let private = Private {
            homes: vec!["/srv/alice".into()],
            names: vec!["alice".into(), "box7".into()],
        };
        for (text, want) in [
            ("/srv/alice/lib/x.so", "~/lib/x.so"),
            ("/home/bob/x.so and /home/eve", "~/x.so and ~"),
            ("/data/data/com.app/files/x.so", "~/files/x.so"),
            ("6.1.0-alice@box7", "6.1.0-?@?"),
            ("malice of box77", "malice of box77"),
            ("/vendor/lib64/libcdsprpc.so", "/vendor/lib64/libcdsprpc.so"),
        ] {
            assert_eq!(private.hide(text), want);
        }
    }
}
