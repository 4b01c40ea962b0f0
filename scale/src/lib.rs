//! Test-time scaling: many answers of a small model to one question, and the choice among them.
//!
//! A client of an unmodified llama-server, which samples; nothing here computes a model.
//!
//! | module | holds |
//! |---|---|
//! | [`problem`] | problems as JSON lines, in the forms of the usual data sets |
//! | [`server`] | requests to llama-server |
//! | [`local`] | a llama-server that is started for a run |
//! | [`search`] | independent samples, beam search by steps, diverse trees |
//! | [`score`] | scores of the steps of a solution |
//! | [`choose`] | votes, and the best of N |
//! | [`answer`] | the answer in a text, and when two answers are the same |
//! | [`journal`] | the file of finished problems, from which a run resumes |
//! | [`run`] | all problems of a file |
//! | [`summary`] | accuracy against N |

pub mod answer;
pub mod choose;
pub mod error;
pub mod journal;
pub mod local;
pub mod problem;
pub mod run;
pub mod score;
pub mod search;
pub mod server;
pub mod summary;

pub use self::error::Error;
