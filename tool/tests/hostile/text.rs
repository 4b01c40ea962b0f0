//! Files of text: times of other programs, settings, problems, solutions and traces.

use crate::{Files, HOSTILE_TEXT, NUMBERS};

pub fn times() -> Files {
    let line = |m: &str, n: &str, k: &str, time: &str| {
        format!(
            "MUL_MAT(type_a=q8_0,type_b=f32,m={m},n={n},k={k},bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1,src_overlap=0,\
             m_v=0,pad=0): 852 runs - {time} us/run - 117 MFLOP/run\n"
        )
        .into_bytes()
    };
    let mut cases = Vec::new();
    for number in NUMBERS {
        let number = number.to_string();
        cases.push((format!("m={number}"), line(&number, "1", "32", "1.0")));
        cases.push((format!("n={number}"), line("32", &number, "32", "1.0")));
        cases.push((format!("k={number}"), line("32", "1", &number, "1.0")));
    }
    for time in ["0", "1.2.3", ".", &"9".repeat(400), "0.000000001"] {
        cases.push((format!("time {time:.10}"), line("32", "1", "32", time)));
    }
    cases.push((
        "all of 2^20".into(),
        line("1048576", "1048576", "1048576", "1"),
    ));
    cases.push((
        "many starts".into(),
        b"MUL_MAT(type_a=q8_0,type_b=f32,m=1".repeat(20_000),
    ));
    cases.push(("a line of controls".into(), HOSTILE_TEXT.repeat(100)));
    cases.push(("nothing".into(), Vec::new()));
    cases
}

pub fn settings() -> Files {
    let lines: [&[u8]; 9] = [
        b"",
        b"min_m.rk3588 = 0",
        b"min_m.rk3588 = 99999999999999999999999",
        b"min_m.rk3588 = 2\nmin_m.rk3588 = 2\n",
        b"=\n===\n",
        b"min_m.\x1b[31m = 1",
        b"\xff\xfe\0\0",
        HOSTILE_TEXT,
        b"min_m.rk3588.simulated.simulated = 1",
    ];
    let mut cases: Vec<_> = (lines.iter())
        .map(|line| {
            (
                format!("settings {:?}", String::from_utf8_lossy(line)),
                line.to_vec(),
            )
        })
        .collect();
    cases.push(("long settings".into(), b"# x\n".repeat(1 << 20)));
    cases
}

/// Good problems.
pub const PROBLEMS: &str =
    "{\"question\": \"2+2\", \"answer\": \"4\"}\n{\"question\": \"3*5\", \"answer\": \"15\"}\n";

/// Good solutions of the problems, in the form in which a run writes them.
pub const SOLUTIONS: &str = concat!(
    r#"{"settings": {"model": "m", "method": "majority", "n": 2}}"#,
    "\n",
    r#"{"id": "1", "expected": "4", "chosen": "4", "correct": true, "tokens": 9, "solutions": [{"text": "4", "answer": "4", "correct": true, "tokens": 9, "logprob": -0.1}, {"text": "5", "answer": "5", "correct": false, "tokens": 8, "logprob": -0.2}]}"#,
    "\n",
    r#"{"id": "2", "expected": "15", "chosen": "15", "correct": true, "tokens": 9, "solutions": [{"text": "15", "answer": "15", "correct": true, "tokens": 9, "logprob": -0.1}]}"#,
    "\n",
);

/// A good trace of one operation.
pub const TRACE: &str = concat!(
    "[\n",
    r#"{"ph":"M","pid":1,"name":"process_name","args":{"name":"HEX0 (simulated)"}},"#,
    "\n",
    r#"{"ph":"M","pid":1,"tid":1,"name":"thread_name","args":{"name":"host"}},"#,
    "\n",
    r#"{"ph":"X","pid":1,"tid":1,"ts":1.0,"dur":2.0,"name":"graph 0","cat":"measured","args":{"graph":0}},"#,
    "\n",
    r#"{"ph":"X","pid":1,"tid":1,"ts":1.0,"dur":2.0,"name":"MUL_MAT","cat":"measured","args":{"node":0,"graph":0,"shape":"64x1","modelled_us":1.0,"device_us":1.0}}"#,
    "\n]\n",
);

/// Values that replace any value of JSON.
fn values() -> Vec<(String, String)> {
    let hostile = serde_json::to_string(&String::from_utf8_lossy(HOSTILE_TEXT)).unwrap();
    let mut values: Vec<(String, String)> = NUMBERS.map(|n| (n.to_string(), n.to_string())).into();
    for value in [
        "-1", "1e308", "-1e308", "1e999", "1e-400", "null", "true", "NaN", "[]", "{}", "\"\"",
        "[null]", "\"NaN\"",
    ] {
        values.push((value.into(), value.into()));
    }
    values.push(("controls".into(), hostile));
    values.push(("half a pair".into(), "\"\\ud800\"".into()));
    values.push(("a long text".into(), format!("\"{}\"", "x".repeat(1 << 20))));
    values.push(("a deep list".into(), "[".repeat(100_000)));
    let nested = |open: &str, leaf: &str, close: &str| {
        (0..20).fold(leaf.to_owned(), |inner, _| format!("{open}{inner}{close}"))
    };
    values.push((
        "a set of sets".into(),
        format!("\"{}\"", nested("\\\\{1,", "1/2", "\\\\}")),
    ));
    let wide = (0..13).fold("1/2".to_owned(), |inner, _| {
        format!("\\\\{{{inner},{inner}\\\\}}")
    });
    values.push(("a wide set of sets".into(), format!("\"{wide}\"")));
    values.push((
        "many numbers".into(),
        format!("\"{}\"", "1,".repeat(100_000)),
    ));
    values.push((
        "many brackets".into(),
        format!("\"{}\"", "(".repeat(500_000)),
    ));
    values
}

/// A good text in which the value of each of `fields` is replaced by each kind of JSON value.
fn replaced(what: &str, good: &str, fields: &[&str]) -> Files {
    let mut cases = Files::new();
    for field in fields {
        let start = good.find(field).unwrap() + field.len();
        let old = good[start..].find([',', '}']).unwrap();
        for (name, value) in values() {
            let text = [&good[..start], &value, &good[start + old..]].concat();
            cases.push((format!("{what} with {name} as {field}"), text.into_bytes()));
        }
    }
    cases
}

fn add(cases: &mut Files, name: &str, text: impl Into<Vec<u8>>) {
    cases.push((name.into(), text.into()));
}

pub fn problems() -> Files {
    let mut cases = replaced("problems", PROBLEMS, &["\"question\": ", "\"answer\": "]);
    let line = |id: &str| format!("{{\"question\": \"q\", \"answer\": \"a\", \"id\": {id}}}\n");
    for (name, value) in values() {
        add(
            &mut cases,
            &format!("a problem with {name} as id"),
            line(&value),
        );
    }
    add(&mut cases, "a problem twice", line("\"1\"").repeat(2));
    add(&mut cases, "many problems", PROBLEMS.repeat(50_000));
    add(
        &mut cases,
        "a problem without an answer",
        "{\"question\": \"q\"}\n",
    );
    add(
        &mut cases,
        "a field twice",
        "{\"question\": \"q\", \"question\": \"r\", \"answer\": \"a\"}\n",
    );
    add(&mut cases, "a long line of spaces", " ".repeat(1 << 20));
    add(&mut cases, "lines of nothing", "\n".repeat(1 << 20));
    cases
}

pub fn solutions() -> Files {
    let fields = [
        "\"n\": ",
        "\"model\": ",
        "\"expected\": ",
        "\"chosen\": ",
        "\"tokens\": ",
        "\"answer\": ",
        "\"logprob\": ",
    ];
    let mut cases = replaced("solutions", SOLUTIONS, &fields);
    for (name, value) in values() {
        let scores = format!("\"scores\": [{value}], \"tokens\": ");
        let at = SOLUTIONS.rfind("\"tokens\": ").unwrap();
        let text = [&SOLUTIONS[..at], &scores, &SOLUTIONS[at + 10..]].concat();
        add(&mut cases, &format!("solutions with {name} as score"), text);
        let both = SOLUTIONS.replace("\"4\"", &value).replace("\"5\"", &value);
        add(
            &mut cases,
            &format!("solutions with {name} as all answers"),
            both,
        );
    }
    let lines: Vec<&str> = SOLUTIONS.lines().collect();
    add(
        &mut cases,
        "solutions without settings",
        lines[1..].join("\n"),
    );
    add(&mut cases, "settings alone", lines[0]);
    add(
        &mut cases,
        "a problem solved twice",
        [lines[0], lines[1], lines[1], ""].join("\n"),
    );
    add(
        &mut cases,
        "half a line",
        &SOLUTIONS[..SOLUTIONS.len() - 20],
    );
    let solution = &lines[2][lines[2].find("[{").unwrap() + 1..lines[2].len() - 2];
    let many = lines[2].replace(solution, &[solution; 5000].join(","));
    add(
        &mut cases,
        "many solutions",
        [lines[0], &many, ""].join("\n"),
    );
    let line = |id: usize| format!("{}\n", lines[2].replace("\"2\"", &format!("\"{id}\"")));
    let all: String = (0..2000).map(line).collect();
    add(
        &mut cases,
        "many solved problems",
        format!("{}\n{all}", lines[0]),
    );
    cases
}

pub fn heads() -> Files {
    let good = "{\"weight\": [0.5, 0.25], \"bias\": 0.1}\n";
    let mut cases = replaced("a head", good, &["\"bias\": ", "\"weight\": ["]);
    add(&mut cases, "a head without weights", "{\"bias\": 1}");
    add(
        &mut cases,
        "a large head",
        format!("{{\"weight\": [{}1], \"bias\": 0}}", "0.5,".repeat(1 << 20)),
    );
    cases
}

pub fn traces() -> Files {
    let fields = [
        "\"pid\":",
        "\"tid\":",
        "\"ts\":",
        "\"dur\":",
        "\"name\":",
        "\"args\":",
        "\"node\":",
        "\"graph\":",
        "\"shape\":",
        "\"modelled_us\":",
    ];
    let mut cases = replaced("a trace", TRACE, &fields);
    add(
        &mut cases,
        "a trace that is cut",
        &TRACE[..TRACE.len() - 30],
    );
    add(
        &mut cases,
        "a trace in an object",
        format!("{{\"traceEvents\": {TRACE}}}"),
    );
    let event = TRACE.lines().nth(4).unwrap();
    let many = TRACE.replace(event, &[event; 50_000].join(",\n"));
    add(&mut cases, "a long trace", many);
    cases
}
