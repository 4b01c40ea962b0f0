//! `ggml-npu scale`: many answers of a small model to each problem, and the choice among them.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args as ClapArgs, CommandFactory as _, Subcommand, ValueEnum};
use serde_json::{Value, json};
use test_time_scaling::journal::{Journal, RunSettings};
use test_time_scaling::run::{RunPlan, SearchMethod, run as solve_all};
use test_time_scaling::score::{
    Aggregate, HeadWeights, LogProbability, PlusMinus, Scorer, SelfCertainty, ValueHead, Verifier,
};
use test_time_scaling::search::Sampler;
use test_time_scaling::search::tree::Limits;
use test_time_scaling::server::{LlamaServer, Sampling};
use test_time_scaling::{Error, problem};

use crate::ToolError;
use crate::files::Files;
use crate::progress::Progress;
use crate::text::say;

mod plot;
mod report;

/// Solve problems by trying many times
///
/// A client of llama-server, which may run on an NPU:
///
///   llama-server -m model.gguf -ngl 99 -np 16 -kvu -c 16384
///   ggml-npu scale run problems.jsonl -o samples.jsonl -n 16
///   ggml-npu scale report samples.jsonl
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct ScaleArgs {
    #[command(subcommand)]
    command: ScaleAction,
}

#[derive(Debug, Subcommand)]
enum ScaleAction {
    Run(Box<RunArgs>),
    Report(report::ReportArgs),
}

/// Solve problems; a run that was interrupted goes on where it ended
#[derive(Debug, ClapArgs)]
struct RunArgs {
    /// The problems, one in each line, as JSON: GSM8K, MATH-500, SVAMP, ASDiv, MAWPS, reasoning-gym,
    /// or fields question and answer
    problems: PathBuf,
    /// The file of finished problems. The same command goes on with it
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// The llama-server
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    url: String,
    /// The way to find an answer
    #[arg(long, value_enum, default_value_t = MethodName::Majority)]
    method: MethodName,
    /// Number of solutions
    #[arg(short, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    n: u16,
    /// The scorer of the steps of a solution [default: none; logprob where the method needs one]
    #[arg(long, value_enum)]
    scorer: Option<ScorerName>,
    /// The llama-server of the reward model
    #[arg(long, value_name = "URL", required_if_eq_any([("scorer", "plus-minus"), ("scorer", "head")]))]
    reward_url: Option<String>,
    /// The text for a plus-minus model; {question} and {steps} are replaced
    #[arg(long, value_name = "TEXT", default_value = "{question}\n\n{steps}")]
    reward_prompt: String,
    /// A plus-minus model's sign for a good step, one token
    #[arg(long, value_name = "TEXT", default_value = "+")]
    plus: String,
    /// A plus-minus model's sign for a bad step, one token
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "-",
        allow_hyphen_values = true
    )]
    minus: String,
    /// The value head of a reward model: JSON with weight, a list, and bias
    #[arg(long, value_name = "FILE", required_if_eq("scorer", "head"))]
    head: Option<PathBuf>,
    /// A shell command that reads JSON with question, text and answer, and prints a number
    #[arg(long, value_name = "COMMAND", required_if_eq("scorer", "command"))]
    verifier: Option<String>,
    /// The rule that makes one score of those of the steps
    #[arg(long, value_enum, default_value_t = AggregateName::Last)]
    aggregate: AggregateName,
    /// Take only the first COUNT problems
    #[arg(long, value_name = "COUNT")]
    limit: Option<usize>,
    /// The text for the model; {question} is replaced
    #[arg(long, value_name = "TEXT", default_value = PROMPT)]
    prompt: String,
    /// Send the text as it is, not as a message in the model's chat template
    #[arg(long)]
    no_chat: bool,
    /// Most tokens of a solution
    #[arg(long, value_name = "COUNT", default_value_t = 1024)]
    max_tokens: usize,
    /// beam, dvts: samples of a step of which one goes on
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    width: u16,
    /// beam, dvts: most steps; the last one runs to the end of the text
    #[arg(long, value_name = "COUNT", default_value_t = 40, value_parser = clap::value_parser!(u16).range(1..))]
    max_steps: u16,
    /// beam, dvts: most tokens of a step; a longer one ends its solution
    #[arg(long, value_name = "COUNT", default_value_t = 256)]
    max_step_tokens: usize,
    /// beam, dvts: a step does not end inside of brackets, of a formula or of a block of code
    #[arg(long)]
    balanced_steps: bool,
    /// Temperature
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Least sum of probabilities of the tokens to sample from
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    /// Likeliest tokens to sample from; 0: all
    #[arg(long, default_value_t = 0)]
    top_k: u32,
    /// Seed. The same seed gives the same samples if the server's arithmetic does not depend on what
    /// it computes at the same time
    #[arg(long, default_value_t = 1)]
    seed: u32,
    /// Seconds to wait for an answer of the server
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
}

impl RunArgs {
    /// Returns `true` for a method that scores each step.
    fn is_by_steps(&self) -> bool {
        matches!(self.method, MethodName::Beam | MethodName::Dvts)
    }
}

const PROMPT: &str = "{question}\n\nSolve this step by step, with an empty line between two steps. \
                      Put the final answer in \\boxed{}.";

/// Likeliest tokens of which self-certainty is computed.
const CERTAINTY_TOKENS: usize = 20;

#[derive(Clone, Copy, Debug, ValueEnum)]
enum MethodName {
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
enum ScorerName {
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
enum AggregateName {
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

/// Returns the name of a choice on the command line.
fn name(choice: impl ValueEnum) -> String {
    let choice = choice.to_possible_value();
    choice.map_or_else(String::new, |choice| choice.get_name().into())
}

/// Runs the subcommand.
///
/// # Errors
/// Text for the user.
pub fn run(args: &ScaleArgs) -> Result<ExitCode, ToolError> {
    match &args.command {
        ScaleAction::Run(args) => run_all(args),
        ScaleAction::Report(args) => report::run(args),
    }
}

/// Ends the program if options do not go together.
fn check_options(args: &RunArgs) {
    let misfit = if args.is_by_steps() && !args.n.is_multiple_of(args.width) {
        format!("-n {} is no multiple of --width {}", args.n, args.width)
    } else if args.scorer == Some(ScorerName::None) && !matches!(args.method, MethodName::Majority)
    {
        format!("--method {} needs a --scorer", name(args.method))
    } else {
        return;
    };
    (crate::Cli::command().error(ErrorKind::ArgumentConflict, misfit)).exit();
}

fn run_all(args: &RunArgs) -> Result<ExitCode, ToolError> {
    check_options(args);
    let mut files = Files::default();
    let text = files.text(&args.problems)?;
    files.output(&args.output)?;
    let mut problems = problem::parse(&args.problems, &text)?;
    problems.truncate(args.limit.unwrap_or(usize::MAX));
    let server = LlamaServer::connect(&args.url, args.timeout)?;
    let scorer = scorer(args);
    let chosen = make_scorer(args, scorer, &mut files)?;
    let (mut journal, finished) = Journal::open(&args.output, &settings(args, &server, scorer))?;
    let total = problems.len();
    problems.retain(|problem| !finished.contains(&problem.id));
    if problems.len() < total {
        let done = total - problems.len();
        say(format_args!(
            "{done} of {total} problems are in {}",
            args.output.display()
        ));
    }

    let sampler = Sampler {
        server: &server,
        sampling: Sampling {
            temperature: args.temperature,
            top_p: args.top_p,
            top_k: args.top_k,
            n_probs: if scorer == ScorerName::Certainty {
                CERTAINTY_TOKENS
            } else {
                1
            },
        },
    };
    let prompt = |question: &str| -> Result<String, Error> {
        let text = args.prompt.replace("{question}", question);
        if args.no_chat {
            Ok(text)
        } else {
            server.chat_prompt(&text)
        }
    };
    let limits = Limits {
        width: args.width.into(),
        max_steps: args.max_steps.into(),
        max_step_tokens: args.max_step_tokens,
        max_tokens: args.max_tokens,
        balanced: args.balanced_steps,
    };
    let plan = RunPlan {
        method: match args.method {
            MethodName::Majority => SearchMethod::Majority,
            MethodName::BestOfN => SearchMethod::BestOfN,
            MethodName::Beam => SearchMethod::Beam(limits),
            MethodName::Dvts => SearchMethod::Trees(limits),
        },
        n: args.n.into(),
        max_tokens: args.max_tokens,
        seed: args.seed,
        generator: &sampler,
        prompt: &prompt,
        scorer: chosen.as_deref(),
        aggregate: args.aggregate.into(),
    };
    let progress = Progress::new("problems", problems.len() as u64);
    let workers = (server.slots() / usize::from(args.n)).max(1);
    let done = solve_all(&plan, &problems, workers, &mut journal, &|_| {
        progress.add(1)
    });
    progress.finish();
    done.map_err(|error| kept(&args.output, &error))?;
    report::print(&args.output, args.aggregate.into())?;
    Ok(ExitCode::SUCCESS)
}

/// Formats an error of a run that can go on later.
fn kept(output: &Path, error: &Error) -> String {
    let output = output.display();
    format!("{error}; finished problems are in {output}, and the same command goes on with it")
}

/// Returns the scorer, with the default of the method.
fn scorer(args: &RunArgs) -> ScorerName {
    args.scorer.unwrap_or(match args.method {
        MethodName::Majority => ScorerName::None,
        _ => ScorerName::Logprob,
    })
}

/// Makes the scorer, which may ask another server.
fn make_scorer(
    args: &RunArgs,
    scorer: ScorerName,
    files: &mut Files,
) -> Result<Option<Box<dyn Scorer>>, ToolError> {
    let server =
        || LlamaServer::connect(args.reward_url.as_deref().unwrap_or_default(), args.timeout);
    Ok(Some(match scorer {
        ScorerName::None => return Ok(None),
        ScorerName::Logprob => Box::new(LogProbability),
        ScorerName::Certainty => Box::new(SelfCertainty),
        ScorerName::PlusMinus => {
            let signs = [args.plus.as_str(), &args.minus];
            Box::new(PlusMinus::new(
                server()?,
                args.reward_prompt.clone(),
                signs,
            )?)
        }
        ScorerName::Head => {
            let path = args.head.as_deref().unwrap_or(Path::new(""));
            let head: HeadWeights = serde_json::from_str(&files.text(path)?)
                .map_err(|error| format!("{}: {error}", path.display()))?;
            Box::new(ValueHead {
                server: server()?,
                head,
            })
        }
        ScorerName::Command => Box::new(Verifier {
            command: args.verifier.clone().unwrap_or_default(),
        }),
    }))
}

/// Returns what must be the same for entries of one journal. How many problems, and where the server
/// is, may change.
fn settings(args: &RunArgs, server: &LlamaServer, scorer: ScorerName) -> RunSettings {
    let mut settings = json!({
        "model": server.model(),
        "method": name(args.method),
        "n": args.n,
        "scorer": name(scorer),
        "aggregate": name(args.aggregate),
        "prompt": args.prompt,
        "chat": !args.no_chat,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "seed": args.seed,
    });
    match scorer {
        ScorerName::PlusMinus => {
            settings["reward"] = json!([args.reward_prompt, args.plus, args.minus]);
        }
        ScorerName::Head => settings["head"] = json!(args.head),
        ScorerName::Command => settings["verifier"] = json!(args.verifier),
        _ => {}
    }
    if args.is_by_steps() {
        settings["width"] = json!(args.width);
        settings["max_steps"] = json!(args.max_steps);
        settings["max_step_tokens"] = json!(args.max_step_tokens);
        settings["balanced_steps"] = json!(args.balanced_steps);
    }
    match settings {
        Value::Object(settings) => settings,
        _ => RunSettings::new(),
    }
}
