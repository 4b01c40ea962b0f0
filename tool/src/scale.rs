//! `ggml-npu scale`: many answers of a small model to each problem, and the choice among them.

use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args as ClapArgs, CommandFactory as _, Subcommand, ValueEnum};
use ggml_rust_npu::files::open_input;
use serde_json::{Value, json};
use test_time_scaling::journal::{Journal, RunSettings};
use test_time_scaling::local::{LocalServer, ServerCommand};
use test_time_scaling::run::{RunPlan, SearchMethod, run as solve_all};
use test_time_scaling::score::{
    HeadWeights, LogProbability, PlusMinus, Scorer, SelfCertainty, ValueHead, Verifier,
};
use test_time_scaling::search::Sampler;
use test_time_scaling::search::tree::Limits;
use test_time_scaling::server::{LlamaServer, Sampling};
use test_time_scaling::{Error, problem};
use xxhash_rust::xxh3::xxh3_128;

use crate::ToolError;
use crate::files::Files;
use crate::power::{Meter, PowerSource};
use crate::progress::Progress;
use crate::text::say;

mod options;
mod plot;
mod report;

use self::options::{AggregateName, MethodName, RunArgs, ScorerName};

/// Solve problems by trying many times
///
/// A client of llama-server, which may run on an NPU. It is started for a run, or runs already:
///
///   ggml-npu scale run problems.jsonl -o samples.jsonl -n 16 --model model.gguf -- -ngl 99
///   ggml-npu scale report samples.jsonl
///
///   llama-server -m model.gguf -ngl 99 -np 16 -kvu -c 16384
///   ggml-npu scale run problems.jsonl -o samples.jsonl -n 16
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

/// Number of likeliest tokens from which self-certainty is computed.
const CERTAINTY_TOKENS: usize = 20;

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
    } else if let Some((option, scorers)) = args.idle_option() {
        let scorers: Vec<String> = scorers.iter().copied().map(name).collect();
        format!("{option} goes with --scorer {}", scorers.join(" or "))
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
    let power = args.power.as_deref().map(PowerSource::open).transpose()?;
    let hash = args.model.as_deref().map(hash_of).transpose()?;
    let mut local = start(args)?;
    let url = local.as_ref().map_or(args.url.as_str(), LocalServer::url);
    let server = LlamaServer::connect(url, args.timeout)?;
    let scorer = args.scorer();
    let (chosen, of_scorer) = make_scorer(args, scorer, &mut files)?;
    let mut settings = settings(args, &server, scorer, of_scorer);
    if let Some(hash) = hash {
        settings.insert("model_hash".into(), json!(hash));
        settings.insert("server_args".into(), json!(args.server_args));
    }
    let (mut journal, finished) = Journal::open(&args.output, &settings, &problems)?;
    if !journal.is_locked() {
        say(format_args!(
            "warning: {} cannot be locked here: do not write it with another run at the same time",
            args.output.display()
        ));
    }
    problems.truncate(args.limit.unwrap_or(usize::MAX));
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
    let meter = Meter::default();
    let joules = || meter.take();
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
        energy: power.is_some().then_some(&joules),
    };
    let progress = Progress::new("problems", problems.len() as u64);
    let workers = (server.slots() / usize::from(args.n)).max(1);
    let mut work = || -> Result<(), ToolError> {
        let done = solve_all(&plan, &problems, workers, &mut journal, &|_| {
            progress.add(1)
        });
        progress.finish();
        let done = done.map_err(|error| match &mut local {
            Some(local) => local.explain(error),
            None => error,
        });
        done.map_err(|error| kept(&args.output, &error).into())
    };
    match &power {
        Some(source) => source.metered(&meter, work)?.0,
        None => work()?,
    }
    report::print(&args.output)?;
    Ok(ExitCode::SUCCESS)
}

/// Tokens of a prompt for which a server that is started has room.
const PROMPT_TOKENS: usize = 1024;

/// Starts a server, if there is a model for it.
fn start(args: &RunArgs) -> Result<Option<LocalServer>, Error> {
    let Some(model) = &args.model else {
        return Ok(None);
    };
    let slots = usize::from(args.n);
    let command = ServerCommand {
        program: args.server_bin.clone(),
        model: model.clone(),
        slots,
        // Plain sampling stores a prompt once for all completions; a search by steps may need a
        // copy for each slot.
        context: match args.is_by_steps() {
            true => slots * (PROMPT_TOKENS + args.max_tokens),
            false => PROMPT_TOKENS + slots * args.max_tokens,
        },
        args: args.server_args.clone(),
    };
    say(format_args!("loading {}", model.display()));
    let progress = Progress::waiting("loading");
    let server = LocalServer::start(&command, args.timeout);
    progress.finish();
    server.map(Some)
}

/// Returns a hash of a model's length and of pieces from all over it: those of another one of its
/// name differ, be it the same model in another format.
fn hash_of(model: &Path) -> Result<String, ToolError> {
    const PIECES: u64 = 1024;
    const PIECE_BYTES: u64 = 4096;
    let hashed = || -> io::Result<Vec<u8>> {
        let mut file = open_input(model)?;
        let bytes = file.metadata()?.len();
        let mut hashed = bytes.to_le_bytes().to_vec();
        for piece in 0..PIECES.min(bytes.div_ceil(PIECE_BYTES)) {
            let step = (bytes / PIECES).max(PIECE_BYTES);
            file.seek(SeekFrom::Start(piece * step))?;
            (&file).take(PIECE_BYTES).read_to_end(&mut hashed)?;
        }
        Ok(hashed)
    };
    let hashed = hashed().map_err(|error| format!("{}: {error}", model.display()))?;
    Ok(format!("{:032x}", xxh3_128(&hashed)))
}

/// Formats an error of a run that can go on later.
fn kept(output: &Path, error: &Error) -> String {
    let output = output.display();
    format!("{error}; finished problems are in {output}, and the same command goes on with it")
}

/// A plus-minus model's text, and its signs for good and bad steps.
const REWARD: [&str; 3] = ["{question}\n\n{steps}", "+", "-"];

/// Makes the scorer, which may use another server. Also returns those settings that are the
/// scorer's.
fn make_scorer(
    args: &RunArgs,
    scorer: ScorerName,
    files: &mut Files,
) -> Result<(Option<Box<dyn Scorer>>, Value), ToolError> {
    let server =
        || LlamaServer::connect(args.reward_url.as_deref().unwrap_or_default(), args.timeout);
    let (scorer, settings): (Box<dyn Scorer>, Value) = match scorer {
        ScorerName::None => return Ok((None, json!({}))),
        ScorerName::Logprob => (Box::new(LogProbability), json!({})),
        ScorerName::Certainty => (Box::new(SelfCertainty), json!({})),
        ScorerName::PlusMinus => {
            let server = server()?;
            let given = [&args.reward_prompt, &args.plus, &args.minus];
            let reward: [&str; 3] =
                std::array::from_fn(|i| given[i].as_deref().unwrap_or(REWARD[i]));
            let settings = json!({"reward_model": server.model(), "reward": reward});
            let [prompt, plus, minus] = reward;
            let scorer = PlusMinus::new(server, prompt.into(), [plus, minus])?;
            (Box::new(scorer), settings)
        }
        ScorerName::Head => {
            let path = args.head.as_deref().unwrap_or(Path::new(""));
            let text = files.text(path)?;
            let head: HeadWeights = serde_json::from_str(&text)
                .map_err(|error| format!("{}: {error}", path.display()))?;
            let server = server()?;
            let settings = json!({
                "reward_model": server.model(),
                "head": format!("{:032x}", xxh3_128(text.as_bytes())),
            });
            (Box::new(ValueHead::new(server, head)?), settings)
        }
        ScorerName::Command => (
            Box::new(Verifier {
                command: args.verifier.clone().unwrap_or_default(),
            }),
            json!({"verifier": args.verifier}),
        ),
    };
    Ok((Some(scorer), settings))
}

/// Returns the settings that must be equal for all entries of one journal. How many problems, and
/// where the server is, may change.
fn settings(
    args: &RunArgs,
    server: &LlamaServer,
    scorer: ScorerName,
    of_scorer: Value,
) -> RunSettings {
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
    if args.is_by_steps() {
        settings["width"] = json!(args.width);
        settings["max_steps"] = json!(args.max_steps);
        settings["max_step_tokens"] = json!(args.max_step_tokens);
        settings["balanced_steps"] = json!(args.balanced_steps);
    }
    let maps = [settings, of_scorer]
        .into_iter()
        .filter_map(|settings| match settings {
            Value::Object(settings) => Some(settings),
            _ => None,
        });
    maps.flatten().collect()
}
