//! The options of `ggml-npu scale run`.

use std::path::PathBuf;

use clap::builder::{RangedU64ValueParser, TypedValueParser};
use clap::{Args as ClapArgs, ValueEnum};
use test_time_scaling::journal::MAX_TOKENS;
use test_time_scaling::score::Aggregate;

/// Solve problems; a run that was interrupted goes on where it ended
#[derive(Debug, ClapArgs)]
pub(super) struct RunArgs {
    /// The problems, one in each line, as JSON: GSM8K, MATH-500, SVAMP, ASDiv, MAWPS,
    /// reasoning-gym, or fields question and answer
    pub(super) problems: PathBuf,
    /// The file of finished problems. The same command goes on with it
    #[arg(short, long, value_name = "FILE")]
    pub(super) output: PathBuf,
    /// A llama-server that runs
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    pub(super) url: String,
    /// Start a llama-server with this GGUF for the run
    #[arg(long, value_name = "GGUF", conflicts_with = "url")]
    pub(super) model: Option<PathBuf>,
    /// The llama-server to start
    #[arg(
        long,
        value_name = "PROGRAM",
        default_value = "llama-server",
        requires = "model",
        conflicts_with = "url"
    )]
    pub(super) server_bin: PathBuf,
    /// Further arguments of the llama-server that is started
    #[arg(
        last = true,
        value_name = "ARGUMENT",
        requires = "model",
        conflicts_with = "url"
    )]
    pub(super) server_args: Vec<String>,
    /// The way to find an answer
    #[arg(long, value_enum, default_value_t = MethodName::Majority)]
    pub(super) method: MethodName,
    /// Number of solutions
    #[arg(short, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    pub(super) n: u16,
    /// The scorer of the steps of a solution [default: none; logprob where the method needs one]
    #[arg(long, value_enum)]
    pub(super) scorer: Option<ScorerName>,
    /// The llama-server of the reward model
    #[arg(long, value_name = "URL", required_if_eq_any([("scorer", "plus-minus"), ("scorer", "head")]))]
    pub(super) reward_url: Option<String>,
    /// The text for a plus-minus model; {question} and {steps} are replaced [default: both, with an
    /// empty line between them]
    #[arg(long, value_name = "TEXT")]
    pub(super) reward_prompt: Option<String>,
    /// A plus-minus model's sign for a good step, one token [default: +]
    #[arg(long, value_name = "TEXT")]
    pub(super) plus: Option<String>,
    /// A plus-minus model's sign for a bad step, one token [default: -]
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(super) minus: Option<String>,
    /// The value head of a reward model: JSON with weight, a list, and bias
    #[arg(long, value_name = "FILE", required_if_eq("scorer", "head"))]
    pub(super) head: Option<PathBuf>,
    /// A shell command that reads JSON with question, text and answer, and prints a number
    #[arg(long, value_name = "COMMAND", required_if_eq("scorer", "command"))]
    pub(super) verifier: Option<String>,
    /// The rule that makes one score of those of the steps
    #[arg(long, value_enum, default_value_t = AggregateName::Last)]
    pub(super) aggregate: AggregateName,
    /// Also measure joules. A folder of /sys/class/hwmon or /sys/class/power_supply, a file with
    /// microwatts, or `command:PROGRAM`, which prints watts. They are those of all that the source
    /// measures
    #[arg(long, value_name = "SOURCE")]
    pub(super) power: Option<String>,
    /// Take only the first COUNT problems
    #[arg(long, value_name = "COUNT")]
    pub(super) limit: Option<usize>,
    /// The text for the model; {question} is replaced
    #[arg(long, value_name = "TEXT", default_value = PROMPT)]
    pub(super) prompt: String,
    /// Send the text as it is, not as a message in the model's chat template
    #[arg(long)]
    pub(super) no_chat: bool,
    /// Most tokens of a solution
    #[arg(long, value_name = "COUNT", default_value_t = 1024, value_parser = tokens())]
    pub(super) max_tokens: usize,
    /// beam, dvts: samples of a step of which one goes on
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    pub(super) width: u16,
    /// beam, dvts: most steps; the last one runs to the end of the text
    #[arg(long, value_name = "COUNT", default_value_t = 40, value_parser = clap::value_parser!(u16).range(1..))]
    pub(super) max_steps: u16,
    /// beam, dvts: most tokens of a step; a longer one ends its solution
    #[arg(long, value_name = "COUNT", default_value_t = 256, value_parser = tokens())]
    pub(super) max_step_tokens: usize,
    /// beam, dvts: a step does not end inside of brackets, of a formula or of a block of code
    #[arg(long)]
    pub(super) balanced_steps: bool,
    /// Temperature
    #[arg(long, default_value_t = 0.8, value_parser = |text: &str| number(text, f64::MAX))]
    pub(super) temperature: f64,
    /// Least sum of probabilities of the tokens to sample from
    #[arg(long, default_value_t = 1.0, value_parser = |text: &str| number(text, 1.0))]
    pub(super) top_p: f64,
    /// Likeliest tokens to sample from; 0: all
    #[arg(long, default_value_t = 0)]
    pub(super) top_k: u32,
    /// Seed. The same seed gives the same samples if the server's arithmetic does not depend on
    /// what it computes at the same time
    #[arg(long, default_value_t = 1)]
    pub(super) seed: u32,
    /// Seconds to wait for an answer of the server
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=A_YEAR_S))]
    pub(super) timeout: u64,
}

const A_YEAR_S: u64 = 365 * 86_400;

fn tokens() -> impl TypedValueParser<Value = usize> {
    RangedU64ValueParser::new().range(1..=MAX_TOKENS as u64)
}

/// Reads a number from 0 to `most`. llama-server would use its default for a number that JSON
/// cannot represent.
fn number(text: &str, most: f64) -> Result<f64, String> {
    let number = text.parse().ok();
    let number = number.filter(|number| (0.0..=most).contains(number));
    number.ok_or_else(|| match most {
        1.0 => "want a number from 0 to 1".into(),
        _ => "want a number that is not negative".into(),
    })
}

impl RunArgs {
    /// Returns `true` for a method that scores each step.
    pub(super) fn is_by_steps(&self) -> bool {
        matches!(self.method, MethodName::Beam | MethodName::Dvts)
    }

    /// Returns the scorer, with the default of the method.
    pub(super) fn scorer(&self) -> ScorerName {
        self.scorer.unwrap_or(match self.method {
            MethodName::Majority => ScorerName::None,
            _ => ScorerName::Logprob,
        })
    }

    /// Returns a given option that the scorer does not read, and the scorers that do.
    pub(super) fn idle_option(&self) -> Option<(&'static str, &'static [ScorerName])> {
        use ScorerName::{Command, Head, PlusMinus};
        let options: [(_, _, &[_]); 6] = [
            ("--verifier", self.verifier.is_some(), &[Command]),
            ("--head", self.head.is_some(), &[Head]),
            (
                "--reward-url",
                self.reward_url.is_some(),
                &[PlusMinus, Head],
            ),
            (
                "--reward-prompt",
                self.reward_prompt.is_some(),
                &[PlusMinus],
            ),
            ("--plus", self.plus.is_some(), &[PlusMinus]),
            ("--minus", self.minus.is_some(), &[PlusMinus]),
        ];
        let scorer = self.scorer();
        let is_idle = |(_, given, scorers): &(_, bool, &[_])| *given && !scorers.contains(&scorer);
        let (option, _, scorers) = options.into_iter().find(is_idle)?;
        Some((option, scorers))
    }
}

const PROMPT: &str = "{question}\n\nSolve this step by step, with an empty line between two steps. \
                      Put the final answer in \\boxed{}.";

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum MethodName {
    /// Independent samples; the answer that most of them have
    Majority,
    /// Independent samples; the one with the best score
    BestOfN,
    /// Beam search by steps, which empty lines separate: the best of each --width samples go on
    Beam,
    /// Diverse trees: N / --width searches, each of which goes on with the best of --width samples
    Dvts,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum ScorerName {
    /// Nothing: votes and pass@N need no scores
    None,
    /// Mean probability of the tokens
    Logprob,
    /// Self-certainty: how much of the probability the likeliest token has
    Certainty,
    /// A reward model on --reward-url that says + or - after each step
    PlusMinus,
    /// A reward model on --reward-url, started with --embedding --pooling none, and its --head
    Head,
    /// A program: --verifier
    Command,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum AggregateName {
    /// The score of the last step
    Last,
    /// The least
    Min,
    /// The product
    Product,
    /// The mean
    Mean,
}

impl From<AggregateName> for Aggregate {
    fn from(name: AggregateName) -> Self {
        match name {
            AggregateName::Last => Self::Last,
            AggregateName::Min => Self::Min,
            AggregateName::Product => Self::Product,
            AggregateName::Mean => Self::Mean,
        }
    }
}
