use std::fs;

use serde_json::json;
use tempfile::TempDir;

use super::*;

/// A place for a journal, in a folder that is removed at the end.
struct Place {
    _folder: TempDir,
    path: PathBuf,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("samples.jsonl");
        Self {
            _folder: folder,
            path,
        }
    }

    fn open(&self, problems: &[Problem]) -> Result<HashSet<String>, Error> {
        let opened = Journal::open(&self.path, &settings(2), problems);
        opened.map(|(_, names)| names)
    }

    /// Opens a file of these bytes, which must be refused and left unchanged.
    fn refused(&self, bytes: &[u8], problems: &[Problem]) -> Error {
        fs::write(&self.path, bytes).unwrap();
        let error = self.open(problems).unwrap_err();
        let left = fs::read(&self.path).unwrap();
        let text = String::from_utf8_lossy(bytes);
        assert!(left == bytes, "{text:?} was changed: {error}");
        let name = self.path.display().to_string();
        assert!(error.to_string().starts_with(&name), "{error}");
        error
    }
}

fn settings(n: usize) -> RunSettings {
    let settings = json!({"model": "m.gguf", "n": n});
    settings.as_object().unwrap().clone()
}

fn problem(id: &str, question: &str, answer: &str) -> Problem {
    Problem {
        id: id.into(),
        question: question.into(),
        answer: answer.into(),
    }
}

fn solved(problem: &Problem) -> Solved {
    Solved {
        id: problem.id.clone(),
        question_hash: Some(problem.question_hash()),
        expected: problem.answer.clone(),
        chosen: None,
        correct: false,
        tokens: 0,
        joules: None,
        solutions: Vec::new(),
    }
}

fn sums() -> [Problem; 2] {
    [problem("1", "2+2", "4"), problem("2", "3+3", "6")]
}

/// Returns a whole journal of problems.
fn journal(problems: &[Problem]) -> Vec<u8> {
    let place = Place::new();
    let (mut journal, _) = Journal::open(&place.path, &settings(2), problems).unwrap();
    for problem in problems {
        journal.append(&solved(problem)).unwrap();
    }
    fs::read(&place.path).unwrap()
}

#[test]
fn a_foreign_file_keeps_all_of_its_bytes() {
    let place = Place::new();
    let head = journal(&[]);
    let files: [&[u8]; 8] = [
        b"notes",
        b"notes\nwithout an end",
        b"GGUF\x03\0\0\0\n\xff\0\n\0",
        b"\n",
        b"{\"a\": 1}\n{\"b\"",
        // Settings files of other programs.
        b"{\"settings\":{\"theme\":\"dark\"}}",
        b"{\"settings\":[\n1,\n2",
        &head[..5],
    ];
    for bytes in files {
        let error = place.refused(bytes, &sums());
        assert!(error.to_string().contains(", line 1: "), "{error}");
    }
}

#[test]
fn a_journal_that_is_refused_keeps_its_unfinished_line() {
    let place = Place::new();
    let tail = b"{\"id\":\"3\",\"expec";
    let whole = journal(&sums());
    let with_tail = [&whole[..], tail].concat();
    let others = [problem("1", "7+7", "14"), problem("2", "8+8", "16")];
    place.refused(&with_tail, &others);
    place.refused(&[&whole[..], b"{}\n", tail].concat(), &sums());
    let settings = String::from_utf8(with_tail).unwrap();
    let settings = settings.replacen("\"n\":2", "\"n\":3", 1);
    let error = place.refused(settings.as_bytes(), &sums());
    assert!(matches!(error, Error::OtherRun { .. }), "{error}");
}

#[test]
fn a_killed_run_leaves_a_line_that_is_cut_off() {
    let place = Place::new();
    let (head, whole) = (journal(&[]), journal(&sums()));
    for end in [0, MARK.len(), head.len() - 1] {
        fs::write(&place.path, &head[..end]).unwrap();
        assert!(place.open(&sums()).unwrap().is_empty());
        assert_eq!(fs::read(&place.path).unwrap(), head);
    }
    fs::write(&place.path, [&whole[..], b"{\"id\":\"3\",\"expec"].concat()).unwrap();
    let names = place.open(&sums()).unwrap();
    assert_eq!(names, HashSet::from(["1".into(), "2".into()]));
    assert_eq!(fs::read(&place.path).unwrap(), whole);
}

#[test]
fn entries_of_other_problems_are_refused() {
    let place = Place::new();
    let whole = journal(&sums());
    let name = place.path.display();
    let [first, second] = sums();
    let error = place.refused(&whole, &[first.clone(), problem("2", "3+3", "7")]);
    let text =
        format!("{name} has another problem 2, with the answer 6, not 7: choose another output");
    assert_eq!(error.to_string(), text);
    let error = place.refused(&whole, &[problem("1", "1+3", "4"), second.clone()]);
    let text =
        format!("{name} has another problem 1, with another question: choose another output");
    assert_eq!(error.to_string(), text);
    // The order and number of problems may change between runs.
    for problems in [&[][..], &[second, problem("3", "4+4", "8"), first]] {
        assert_eq!(place.open(problems).unwrap().len(), 2);
    }
}

#[test]
fn a_journal_of_an_older_version_has_no_hashes() {
    let place = Place::new();
    let whole = String::from_utf8(journal(&sums())).unwrap();
    let mut old = whole.clone();
    for problem in sums() {
        old = old.replace(
            &format!("\"question_hash\":\"{}\",", problem.question_hash()),
            "",
        );
    }
    assert!(!old.contains("hash") && whole.contains("hash"), "{whole}");
    fs::write(&place.path, &old).unwrap();
    let [first, second] = sums();
    assert_eq!(place.open(&sums()).unwrap().len(), 2);
    place.refused(old.as_bytes(), &[first, problem("2", "3+3", "7")]);
    place.open(&[problem("1", "1+3", "4"), second]).unwrap();
}

#[test]
fn the_hash_of_a_question_is_fnv_1a() {
    // SOURCE: test vectors of Fowler, Noll and Vo.
    for (text, hash) in [
        ("", "cbf29ce484222325"),
        ("a", "af63dc4c8601ec8c"),
        ("foobar", "85944171f73967e8"),
    ] {
        assert_eq!(problem("1", text, "").question_hash(), hash);
    }
}

#[test]
fn a_journal_is_written_without_a_lock_where_there_are_none() {
    let check = |lock| check_lock(Path::new("a.jsonl"), lock);
    let failed = |error: io::Error| Err(TryLockError::Error(error));
    assert!(check(Ok(())).unwrap());
    assert!(!check(failed(io::ErrorKind::Unsupported.into())).unwrap());
    // NFS without a lock service returns these errors.
    for code in [libc::ENOLCK, libc::EOPNOTSUPP, libc::ENOSYS] {
        let error = io::Error::from_raw_os_error(code);
        let is_locked = check(failed(error)).map_err(|error| format!("{code}: {error}"));
        assert_eq!(is_locked, Ok(false));
    }
    for error in [
        io::ErrorKind::PermissionDenied.into(),
        io::Error::from_raw_os_error(libc::EIO),
    ] {
        let error = check(failed(error)).unwrap_err();
        assert!(error.to_string().starts_with("a.jsonl"), "{error}");
    }
    let error = check(Err(TryLockError::WouldBlock)).unwrap_err();
    assert_eq!(error.to_string(), "a.jsonl is written by another run");
}

#[test]
fn a_journal_knows_that_it_is_locked() {
    let place = Place::new();
    let (journal, _) = Journal::open(&place.path, &settings(2), &[]).unwrap();
    assert!(journal.is_locked());
    let error = place.open(&[]).unwrap_err();
    assert!(
        error.to_string().ends_with("is written by another run"),
        "{error}"
    );
}

#[test]
fn nothing_follows_a_line_that_was_not_written() {
    // Neither can a line be written to /dev/full, nor can the file be truncated.
    let full = PathBuf::from("/dev/full");
    let mut journal = Journal {
        file: OpenOptions::new().append(true).open(&full).unwrap(),
        path: full,
        is_locked: false,
        is_cut: false,
    };
    let mut error = || {
        let error = journal.append(&solved(&sums()[0])).unwrap_err();
        error.to_string()
    };
    assert!(error().contains("No space left"));
    assert!(error().contains("its last line is not whole"));
}

#[test]
fn a_model_s_hash_counts_where_both_runs_know_it() {
    let with = |hash: Option<&str>| {
        let mut settings = settings(2);
        settings.extend(hash.map(|hash| ("model_hash".to_owned(), json!(hash))));
        settings
    };
    for (was, now, is_same) in [
        (Some("a"), Some("a"), true),
        (Some("a"), Some("b"), false),
        (None, Some("b"), true),
        (Some("a"), None, true),
    ] {
        let checked = check_settings(Path::new("samples.jsonl"), &with(was), &with(now));
        assert_eq!(checked.is_ok(), is_same, "{was:?} {now:?}");
    }
}

#[test]
fn numbers_beyond_all_runs_are_refused_by_their_line() {
    let line = |n: u64, tokens: u64| {
        let solution =
            json!({"text": "", "answer": null, "correct": false, "tokens": tokens, "logprob": 0.0});
        format!(
            "{}\n{}\n",
            json!({"settings": {"n": n}}),
            json!({"id": "1", "expected": "4", "chosen": null, "correct": false, "tokens": 0, "solutions": [solution]})
        )
    };
    let read = |n, tokens| parse(Path::new("samples.jsonl"), line(n, tokens).as_bytes());
    assert!(read(65535, 1 << 24).is_ok());
    for (n, tokens, words) in [
        (u64::MAX, 1, "line 1: n is 18446744073709551615"),
        (65536, 1, "line 1: n is 65536"),
        (1, u64::MAX, "line 2: 18446744073709551615 tokens"),
        (1, (1 << 24) + 1, "line 2: 16777217 tokens"),
    ] {
        let error = read(n, tokens).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}
