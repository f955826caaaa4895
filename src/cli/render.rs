//! `kvlane render`: a request in, the text or the ids that the engine makes of it out, without a gateway.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use shards::prompt::{Api, Model, Rendering, preview};
use shards::service::Engine;

use super::Outcome;
use crate::models;

/// Bytes of a request at most. A longer one is refused.
pub(super) const REQUEST_BYTES_MAX: u64 = 64 << 20;

/// What `kvlane render` is told on its command line.
#[derive(Debug, Args)]
pub(super) struct RenderArgs {
    /// Directory of tokenizer files: DIR/Qwen__Qwen3-8B/tokenizer.json and so on.
    #[arg(long, value_name = "DIR")]
    tokenizers: PathBuf,
    /// The model's name, as requests spell it.
    #[arg(long, value_name = "NAME")]
    model: String,
    /// Template arguments that the engine was started with, as a JSON object.
    #[arg(long, value_name = "JSON")]
    kwargs: Option<String>,
    /// Chat template file to use instead of the model's own.
    #[arg(long, value_name = "FILE")]
    template: Option<PathBuf>,
    /// Kind of the request on standard input; "template": the template's variables themselves, as a JSON object.
    #[arg(long, value_enum, default_value = "chat")]
    api: ApiName,
    /// Engine whose front end to follow.
    #[arg(long, value_enum, default_value = "vllm")]
    engine: FrontEnd,
    /// Print the token ids as a JSON array instead of the text.
    #[arg(long)]
    ids: bool,
}

/// Kinds of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ApiName {
    /// /v1/chat/completions
    Chat,
    /// /v1/completions
    Completions,
    /// /v1/responses
    Responses,
    /// /v1/messages
    Messages,
    /// SGLang's /generate
    Generate,
    /// No API: variables of the template
    Template,
}

impl ApiName {
    fn api(self) -> Option<Api> {
        match self {
            ApiName::Chat => Some(Api::ChatCompletions),
            ApiName::Completions => Some(Api::Completions),
            ApiName::Responses => Some(Api::Responses),
            ApiName::Messages => Some(Api::Messages),
            ApiName::Generate => Some(Api::Generate),
            ApiName::Template => None,
        }
    }
}

/// Engines with a front end that is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FrontEnd {
    /// vLLM
    Vllm,
    /// SGLang
    Sglang,
    /// TensorRT-LLM
    Trtllm,
}

impl FrontEnd {
    fn engine(self) -> Engine {
        match self {
            FrontEnd::Vllm => Engine::Vllm,
            FrontEnd::Sglang => Engine::Sglang,
            FrontEnd::Trtllm => Engine::Trtllm,
        }
    }
}

/// Text and ids of a request.
struct Rendered {
    text: Option<String>,
    ids: Vec<u32>,
    whole: bool,
}

pub(super) fn render(args: &RenderArgs) -> Outcome {
    super::say_why_prompts_are_refused();
    match run(args) {
        Ok(()) => Outcome::Right,
        Err(Failure::Usage(message)) => {
            eprintln!("kvlane render: {message}");
            Outcome::Usage
        }
        Err(Failure::No(message)) => {
            eprintln!("kvlane render: {message}");
            Outcome::No
        }
    }
}

/// Why nothing was printed.
pub(super) enum Failure {
    /// The command was wrong.
    Usage(String),
    /// There is no such prompt.
    No(String),
}

fn run(args: &RenderArgs) -> Result<(), Failure> {
    let model = models::read_now(&args.tokenizers, &args.model).map_err(Failure::Usage)?.0;
    let template = args.template.as_deref().map(read_template).transpose()?;
    if let Some(kwargs) = &args.kwargs {
        let object = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(kwargs);
        object.map_err(|error| Failure::Usage(format!("--kwargs {kwargs}: no JSON object: {error}")))?;
    }
    let mut request = Vec::new();
    let read = std::io::stdin().lock().take(REQUEST_BYTES_MAX + 1).read_to_end(&mut request);
    read.map_err(|error| Failure::No(format!("standard input: {error}")))?;
    if request.len() as u64 > REQUEST_BYTES_MAX {
        return Err(Failure::Usage(format!("standard input: more than {REQUEST_BYTES_MAX} bytes")));
    }
    let rendered = match args.api.api() {
        Some(api) => rendered(args, &model, template.as_ref(), api, &request)?,
        None => variables(args, &model, template.as_ref(), &request)?,
    };
    if !rendered.whole {
        eprintln!("kvlane render: this is the beginning; what follows cannot be known");
    }
    let mut out = std::io::stdout().lock();
    let written = match &rendered.text {
        Some(text) if !args.ids => out.write_all(text.as_bytes()),
        _ => writeln!(out, "{}", serde_json::json!(rendered.ids)),
    };
    written.and_then(|()| out.flush()).map_err(|error| Failure::No(format!("standard output: {error}")))
}

fn rendered(
    args: &RenderArgs,
    model: &Model,
    template: Option<&Arc<str>>,
    api: Api,
    request: &[u8],
) -> Result<Rendered, Failure> {
    let rendering = Rendering { engine: args.engine.engine(), template, kwargs: args.kwargs.as_deref(), add_bos: None };
    let prompt = preview(api, request, model, rendering)
        .map_err(|reason| Failure::No(format!("the prompt cannot be known: {}", reason.name())))?;
    Ok(Rendered { text: prompt.text, ids: prompt.ids, whole: prompt.whole })
}

fn variables(
    args: &RenderArgs,
    model: &Model,
    template: Option<&Arc<str>>,
    request: &[u8],
) -> Result<Rendered, Failure> {
    let request = std::str::from_utf8(request).map_err(|error| Failure::No(format!("standard input: {error}")))?;
    let kwargs = args.kwargs.as_deref().unwrap_or("{}");
    let text = model.render_json(template, request, kwargs).map_err(Failure::No)?;
    let ids = model.ids(&text).map_err(|error| Failure::No(error.to_string()))?;
    Ok(Rendered { text: Some(text), ids, whole: true })
}

fn read_template(path: &Path) -> Result<Arc<str>, Failure> {
    let text = std::fs::read_to_string(path);
    text.map(Arc::from).map_err(|error| Failure::Usage(format!("--template {}: {error}", path.display())))
}
