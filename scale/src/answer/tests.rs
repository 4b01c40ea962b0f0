use super::{Answer, extract};

/// Pairs which math-verify judges differently: it solves equations for a letter, and distinguishes
/// an integer from a fraction that rounds to it.
const DEVIATIONS: [(&str, &str); 2] = [("2x+y=3", "y=3-2x"), ("5", "5.0000001")];

fn same(a: &str, b: &str) -> bool {
    Answer::parse(a).same(&Answer::parse(b))
}

/// Verdicts of math-verify 0.9.0 about pairs of answers, one a line.
const VERDICTS: &str = include_str!("../../tests/data/math_verify.jsonl");

#[test]
fn answers_are_the_same_where_math_verify_says_so() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for line in VERDICTS.lines() {
        let case: serde_json::Value = serde_json::from_str(line).unwrap();
        let (gold, answer) = (
            case["gold"].as_str().unwrap(),
            case["answer"].as_str().unwrap(),
        );
        count += 1;
        let is_known = DEVIATIONS.contains(&(gold, answer));
        if (same(gold, answer) != case["same"].as_bool().unwrap()) != is_known {
            wrong.push(format!("{gold}   {answer}   {}", case["same"]));
        }
    }
    assert_eq!(count, 433);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_last_box_then_the_last_announcement_then_the_last_number_is_the_answer() {
    let found = |text: &str| extract(text).unwrap_or_default();
    assert_eq!(
        found("\\boxed{3} so \\boxed{\\frac{1}{2}}. The answer is 7."),
        "\\frac{1}{2}"
    );
    assert_eq!(
        found("It is 3.\nThe answer is: **42**.\nCheck: 6 * 7"),
        "42"
    );
    assert_eq!(found("so\n#### 1,234"), "1,234");
    assert_eq!(
        found("The final answer is $\\sqrt{2}$. I hope it is correct."),
        "\\sqrt{2}"
    );
    assert_eq!(found("The answer is 18 dollars for each day."), "18");
    assert_eq!(found("The answer is 3 + 4 = 7."), "7");
    assert_eq!(found("The answer is (3 + 4) * 2 = 14."), "14");
    assert_eq!(found("The answer is 3 apples + 4 apples = 7 apples."), "7");
    assert_eq!(found("The answer is 5 (x = 3, y = 2)."), "5");
    assert_eq!(found("The answer is $12 + $6 = $18."), "18");
    assert_eq!(found("The answer is $12+$6=$18."), "18");
    assert_eq!(found("The answer is $18, not $20."), "18");
    assert_eq!(found("The answer is $18 for her and $x$ for him."), "18");
    assert_eq!(found("The answer is 5, because x >= 3."), "5");
    assert_eq!(
        found("The answer is $5 \\text{ for each}$."),
        "5 \\text{ for each}"
    );
    assert_eq!(found("The answer is $$18$$."), "$$18$$");
    assert_eq!(found("3 apples and 4 pears are 7."), "7");
    assert_eq!(found("he loses -$5.50"), "-$5.50");
    assert_eq!(found("5-3"), "3");
    assert_eq!(found("about 2/3 or 12.5%"), "12.5%");
    assert_eq!(extract("no idea"), None);
    assert_eq!(extract("\\boxed{}"), None);
    // A box that is not closed does not count.
    assert_eq!(found("4, so \\boxed{\\frac{1}{"), "1");
}

#[test]
fn the_number_of_a_remark_is_not_the_answer() {
    for (text, answer) in [
        // The equation is in a remark, so it is not a calculation.
        ("The answer is 10 when x = 2.", "10"),
        ("The answer is 18 because x = 3", "18"),
        ("The answer is 18 because total = 20.", "18"),
        ("The answer is 10 at x = 2.", "10"),
        ("The answer is 1/2 because total = 4.", "1/2"),
        ("The answer is 7 = 3 + 4 in total.", "7"),
        ("The answer is 3 + 4 = 7 apples when x = 2.", "7"),
        ("The answer is 3 + 4 = 7 (x = 2).", "7"),
        // The equation is in the next sentence.
        ("The final answer is 12. Here x = 4.", "12"),
        ("The final answer is **12**. Here 3 * 4 = 13.", "12"),
        ("The final answer is 12 dollars. Here 3 * 4 = 13.", "12"),
        ("The answer is 12. **Check:** 3 * 4 = 13.", "12"),
        ("The answer is 12. Here $x = 4$.", "12"),
        ("The answer is 5: x = 3 works", "5"),
        ("The answer is 5: $x = 3$ works", "5"),
        ("The answer is \\sqrt{2}. Here x = 4.", "\\sqrt{2}"),
        ("The answer is as follows: 3 + 4 = 7 apples.", "7"),
        // These periods are inside a formula, or do not end a sentence.
        ("The answer is $\\{2n : n > 3\\}$.", "\\{2n : n > 3\\}"),
        ("The answer is 5 (i.e. x = 3).", "5"),
        ("The answer is 3 lb. + 4 lb. = 7 lb.", "7"),
        ("The answer is 3: 4", "3: 4"),
        // Calculations.
        ("The answer is 3 m + 4 m = 7 m.", "7"),
        ("The answer is 3 x 4 = 12 apples.", "12"),
        ("The answer is 3 \\times 4 = 12 apples.", "12"),
        ("The answer is 12 divided by 3 = 4 apples.", "4"),
        ("The answer is 20% of 50 = 10 dollars.", "10"),
        ("The answer is \\frac{12}{3} = 4 apples for each.", "4"),
        ("The answer is 3 + 4 = 5 + 2 = 7.", "7"),
        ("The answer is total cost = 5 dollars.", "5"),
        // Definitions.
        ("The answer is x_1 = 5 for all of them.", "5"),
        ("The answer is x1 = 5 for all of them.", "5"),
        ("The answer is f(3) = 9 for all of them.", "9"),
    ] {
        assert_eq!(extract(text).as_deref(), Some(answer), "{text}");
    }
}

#[test]
fn stars_are_bold_type_around_an_answer_and_powers_inside() {
    assert!(same("**8**", "8"));
    assert!(same("2**3", "8"));
    assert!(!same("2**3", "23"));
}

#[test]
fn arbitrary_text_is_compared_without_a_panic() {
    let parts = [
        "\\frac", "{", "}", "(", ")", "1", ",", "^", "-", "\\sqrt", "[", "é", "=", "%", "|", "⦃",
        "\\text", " ",
    ];
    let mut state = 1_u64;
    for _ in 0..20_000 {
        let mut text = String::new();
        for _ in 0..8 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            text += parts[usize::try_from(state >> 33).unwrap() % parts.len()];
        }
        assert!(same(&text, &text), "{text}");
        let _ = extract(&text);
    }
    for part in [
        "(", "2^", "2^-", "\\sqrt", "\\sqrt[", "\\sin", "\\sin^", "\\frac", "\\binom1", "|", "2!^",
    ] {
        let text = part.repeat(100_000);
        assert!(!same(&format!("{text}1"), "1"), "{part}");
        assert!(!same(&text, "1"), "{part}");
    }
    let lists = |depth| format!("{}1{}", "(1,".repeat(depth), ")".repeat(depth));
    assert!(same(&lists(10), &lists(10).replace('1', "1.0")));
    for text in [lists(5_000), "x\\in ".repeat(5_000) + "1"] {
        assert!(same(&text, &text) && !same(&text, "1"));
    }
    // 60 levels are the deepest that is evaluated.
    let brackets = |depth| format!("{}1{}", "(".repeat(depth), ")".repeat(depth));
    assert!(same(&format!("2+{}", brackets(60)), "3"));
    assert!(!same(&format!("2+{}", brackets(61)), "3"));
}

/// Regression: each level of nesting was compared twice, and two answers of 3 KB needed 113 s in a
/// build for tests.
#[test]
fn sets_of_sets_are_compared_once() {
    let nested = |leaf: &str| {
        let two = (0..8).fold(leaf.to_owned(), |inner, _| format!("⦃{inner},{inner}⦄"));
        format!("{}{two}{}", "⦃".repeat(12), "⦄".repeat(12))
    };
    let begun = std::time::Instant::now();
    assert!(same(&nested("1/2"), &nested(".5")));
    assert!(!same(&nested("1/2"), &nested(".4")));
    assert!(begun.elapsed().as_secs() < 10, "{:?}", begun.elapsed());
    // A list that is too long is compared as text.
    let long = |leaf: &str| format!("⦃{}⦄", [leaf; 2000].join(","));
    assert!(same(&long("1/2"), &long("1/2")) && !same(&long("1/2"), &long(".5")));
}

/// Regression: a `\pm` that only cleaning makes doubled the parts at each level, so 711 bytes
/// became two million.
#[test]
fn signs_that_cleaning_makes_are_expanded_a_limited_number_of_times() {
    let sign = |k| format!("\\p{}{}m0", "{".repeat(k), ",}".repeat(k));
    let text: String = std::iter::once("0".to_owned())
        .chain((1..20).map(sign))
        .collect();
    let begun = std::time::Instant::now();
    assert!(same(&text, &text));
    assert!(!same(&text, &format!("1-1+{text}")));
    assert!(begun.elapsed().as_secs() < 10, "{:?}", begun.elapsed());
    assert!(same("\\pm 1 \\pm 2", "\\{3, -3\\}"));
}
