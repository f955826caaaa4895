//! One model: its tokenizer and its chat templates, shared by all shards.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use serde_json::Value;

use super::template::Template;
use super::tokenizer::{Tokenizer, TokenizerError};
use crate::service::{Engine, MissReason};

/// The texts of a model's files.
#[derive(Clone, Debug, Default)]
pub struct ModelFiles {
    /// Name of the directory: the model's name with `/` replaced by `__`.
    pub slug: String,
    /// The directory.
    pub path: PathBuf,
    /// `tokenizer.json`.
    pub tokenizer: String,
    /// `tokenizer_config.json`, if there.
    pub config: Option<String>,
    /// `chat_template.jinja`, if there.
    pub template: Option<String>,
    /// `additional_chat_templates/tool_use.jinja`, if there.
    pub tool_template: Option<String>,
}

/// Which file of a model could not be used, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}: {reason}")]
pub struct ModelError {
    /// Its name inside the model's directory.
    pub file: &'static str,
    /// What is wrong with it.
    pub reason: String,
}

/// Where a model's chat template comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TemplateOrigin {
    /// `chat_template.jinja`.
    File,
    /// `chat_template` in `tokenizer_config.json`.
    Config,
    /// Our own ChatML, because the model's name begins with `Qwen__` and nothing is staged.
    Assumed,
    /// There is none: chats are routed without keys unless the rule names a template.
    Missing,
}

impl TemplateOrigin {
    /// The value in the API.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            TemplateOrigin::File => "chat_template.jinja",
            TemplateOrigin::Config => "tokenizer_config.json",
            TemplateOrigin::Assumed => "assumed_chatml",
            TemplateOrigin::Missing => "missing",
        }
    }
}

/// Templates of rules that one model keeps compiled. Beyond them a rule's template is not used: its chats are routed
/// without keys until the model is read again.
const RULE_TEMPLATES_MAX: usize = 8;

/// Our own ChatML for models whose template is not staged. Whatever real templates of the family treat each in their
/// own way (tools, thinking switches) it refuses.
const CHATML: &str = "{%- if tools or enable_thinking is defined %}{{ raise_exception('the assumed template knows only plain chats') }}{% endif -%}
{%- for message in messages %}
{%- if message.tool_calls or message.role == 'tool' or message.reasoning %}{{ raise_exception('the assumed template knows only plain chats') }}{% endif -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Parts of model names (lower case) whose chats vLLM renders in code: the encoders of DeepSeek V3.2 and V4, Kimi K3 and
/// Inkling, and the tokenizers of Mistral's and Cohere's own, which it chooses by itself.
const RENDERED_BY_VLLM: [&str; 6] =
    ["deepseek-v3.2", "deepseek-v4", "kimi-k3", "inkling", "mistralai__", "coherelabs__"];

/// The same for SGLang: encoders, and conversations that it knows by the model's name.
const RENDERED_BY_SGLANG: [&str; 18] = [
    "deepseek-v3.2",
    "deepseek-v4",
    "kimi-k3",
    "inkling",
    "glm-5.3",
    "vicuna",
    "llava-v1.5",
    "llava-next-video-7b",
    "internvl",
    "janus",
    "deepseek-vl2",
    "minicpm-v",
    "minicpm-o",
    "phi-4-multimodal",
    "deepseek-ocr",
    "paddleocr",
    "points",
    "moss-vl",
];

/// Added tokens that together mark a model whose engine renders chats in code (Harmony), whatever template is staged.
const RENDERED_IN_CODE: [&str; 3] = ["<|channel|>", "<|call|>", "<|return|>"];

/// Tokenizer and chat templates of one model.
#[derive(Debug)]
pub struct Model {
    slug: String,
    path: PathBuf,
    tokenizer: Tokenizer,
    special_tokens: BTreeMap<String, String>,
    has_config: bool,
    origin: TemplateOrigin,
    /// Whether an assumed template is still unconfirmed.
    assumed: AtomicBool,
    default: Option<Result<Template, String>>,
    tool_use: Option<Result<Template, String>>,
    rule_templates: [OnceLock<(Arc<str>, Option<Template>)>; RULE_TEMPLATES_MAX],
    now: fn() -> SystemTime,
}

impl Model {
    /// Reads a model from its files' texts; takes up to seconds, so it is done off the shards. `now` is the clock that
    /// templates may print.
    ///
    /// # Errors
    /// The tokenizer or its configuration cannot be used. A chat template that cannot be used is no error here:
    /// completions still work, and [`Model::template_problem`] tells.
    pub fn load(files: &ModelFiles, now: fn() -> SystemTime) -> Result<Self, ModelError> {
        let failed = |file: &'static str, reason: String| ModelError { file, reason };
        let tokenizer = Tokenizer::from_json(&files.tokenizer).map_err(|e| failed("tokenizer.json", e.to_string()))?;
        let config = match &files.config {
            Some(text) => Config::parse(text).map_err(|reason| failed("tokenizer_config.json", reason))?,
            None => Config::default(),
        };
        let (origin, default, tool_use) = match (&files.template, config.template) {
            (Some(text), _) => (TemplateOrigin::File, Some(text.clone()), files.tool_template.clone()),
            (None, Some(text)) => (TemplateOrigin::Config, Some(text), config.tool_template),
            (None, None) if files.slug.starts_with("Qwen__") => {
                (TemplateOrigin::Assumed, Some(CHATML.to_owned()), None)
            }
            (None, None) => (TemplateOrigin::Missing, None, None),
        };
        let known_tokens =
            (files.config.is_some() || origin == TemplateOrigin::Assumed).then_some(&config.special_tokens);
        let compile = |text: String| compile(&text, known_tokens, now);
        Ok(Model {
            slug: files.slug.clone(),
            path: files.path.clone(),
            tokenizer,
            has_config: files.config.is_some(),
            origin,
            assumed: AtomicBool::new(origin == TemplateOrigin::Assumed),
            default: default.map(compile),
            tool_use: tool_use.map(compile),
            rule_templates: [const { OnceLock::new() }; RULE_TEMPLATES_MAX],
            special_tokens: config.special_tokens,
            now,
        })
    }

    /// Name of the model's directory.
    #[must_use]
    pub fn slug(&self) -> &str {
        &self.slug
    }

    /// The model's directory.
    #[must_use]
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// The model's tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Where the chat template comes from.
    #[must_use]
    pub fn template_origin(&self) -> TemplateOrigin {
        self.origin
    }

    /// Whether the chat template is our own and no stored block has confirmed it yet.
    #[must_use]
    pub fn template_assumed(&self) -> bool {
        self.assumed.load(Ordering::Relaxed)
    }

    /// Notes that an engine stored the blocks that the assumed template led to.
    pub fn confirm_template(&self) {
        self.assumed.store(false, Ordering::Relaxed);
    }

    /// Why chats of this model are routed without keys, if they are: what is wrong, or the file to add.
    #[must_use]
    pub fn template_problem(&self) -> Option<String> {
        if self.is_rendered_in_code(Engine::Vllm) {
            return Some("the engine renders this model's chats in code, not by a template".into());
        }
        match (&self.default, self.origin) {
            (Some(Err(error)), _) => Some(error.clone()),
            (None, _) => Some(format!("no chat template: add {}", self.path.join("chat_template.jinja").display())),
            (Some(Ok(_)), _) => self.tool_use.as_ref().and_then(|t| t.as_ref().err()).cloned(),
        }
    }

    /// The template for a chat: the rule's, else the model's own, with tools the one for tools if there is one.
    ///
    /// # Errors
    /// There is none, or it cannot be used.
    pub(super) fn template(
        &self,
        rule: Option<&Arc<str>>,
        tools: bool,
        engine: Engine,
    ) -> Result<&Template, MissReason> {
        if let Some(text) = rule {
            return self.rule_template(text);
        }
        if self.is_rendered_in_code(engine) {
            return Err(MissReason::EngineRendered);
        }
        // SGLang takes the first of several templates, whatever the request has.
        let tools = tools && engine != Engine::Sglang;
        let own = self.tool_use.as_ref().filter(|_| tools).or(self.default.as_ref());
        own.ok_or(MissReason::TemplateMissing)?.as_ref().map_err(|_| MissReason::Template)
    }

    /// Renders the model's template (or the one given) for variables in JSON: see [`Template::render_json`].
    ///
    /// # Errors
    /// A text: there is no template, it cannot be used, or it refused.
    pub fn render_json(&self, template: Option<&Arc<str>>, variables: &str, kwargs: &str) -> Result<String, String> {
        let template = match template {
            Some(text) => self.rule_template(text).map_err(|reason| reason.name().to_owned())?,
            None => self.default.as_ref().ok_or("the model has no chat template")?.as_ref().map_err(Clone::clone)?,
        };
        template.render_json(variables, kwargs).map_err(|error| error.to_string())
    }

    /// The ids of a text, without special tokens around it.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn ids(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        self.tokenizer.encode(text, &mut Vec::new(), &mut ids)?;
        Ok(ids)
    }

    /// Finds or compiles a rule's template. Two shards may compile the same text at once; one result stays.
    fn rule_template(&self, text: &Arc<str>) -> Result<&Template, MissReason> {
        for slot in &self.rule_templates {
            if slot.get().is_none() {
                // Another shard may have been quicker: then the slot is looked at like a used one.
                let _ = slot.set((Arc::clone(text), self.compile_rule_template(text)));
            }
            match slot.get() {
                Some((known, template)) if Arc::ptr_eq(known, text) || known == text => {
                    return template.as_ref().ok_or(MissReason::Template);
                }
                _ => {}
            }
        }
        Err(MissReason::Template)
    }

    fn compile_rule_template(&self, text: &str) -> Option<Template> {
        let config = self.has_config.then_some(&self.special_tokens);
        compile(text, config, self.now)
            .inspect_err(|reason| tracing::warn!(model = self.slug, reason, "the rule's chat template is not used"))
            .ok()
    }

    /// Whether an engine renders the model's chats in code: then a template, even a staged one, is not what it uses.
    fn is_rendered_in_code(&self, engine: Engine) -> bool {
        let name = self.slug.to_ascii_lowercase();
        match engine {
            // Its chats of Harmony models go through the template.
            Engine::Sglang => RENDERED_BY_SGLANG.iter().any(|part| name.contains(part)),
            Engine::Vllm | Engine::Trtllm | Engine::Llamacpp => {
                RENDERED_BY_VLLM.iter().any(|part| name.contains(part))
                    || RENDERED_IN_CODE.iter().all(|token| self.tokenizer.has_added_token(token))
            }
        }
    }

    /// Ids that special tokens put before a text. `add_bos` is what a rule says; without it, `tokenizer.json` alone
    /// tells, as in transformers 5. (Version 4 also obeyed `add_bos_token` for tokenizers of the Llama class.)
    pub(super) fn prefix(&self, add_bos: Option<bool>) -> Vec<u32> {
        let mut prefix: Vec<u32> = self.tokenizer.prefix().collect();
        let bos = self.special_tokens.get("bos_token").and_then(|token| self.tokenizer.added_token(token));
        if let (Some(add), Some(bos)) = (add_bos, bos) {
            prefix.retain(|id| *id != bos);
            if add {
                prefix.insert(0, bos);
            }
        }
        prefix
    }
}

/// Compiles a template; without a configuration the special tokens are not known, and would print as nothing.
fn compile(
    text: &str,
    special_tokens: Option<&BTreeMap<String, String>>,
    now: fn() -> SystemTime,
) -> Result<Template, String> {
    const NAMES: [&str; 5] = ["bos_token", "eos_token", "unk_token", "pad_token", "image_token"];
    if special_tokens.is_none()
        && let Some(name) = NAMES.iter().find(|name| text.contains(**name))
    {
        return Err(format!("the chat template uses {name}, which only tokenizer_config.json tells: add that file"));
    }
    Template::compile(text, special_tokens.unwrap_or(&BTreeMap::new()), now).map_err(|e| e.to_string())
}

/// What is read from `tokenizer_config.json`.
#[derive(Debug, Default)]
struct Config {
    special_tokens: BTreeMap<String, String>,
    template: Option<String>,
    tool_template: Option<String>,
}

impl Config {
    fn parse(text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let members = value.as_object().ok_or("not a JSON object")?;
        let mut config = Config::default();
        let extra = members.get("extra_special_tokens").and_then(Value::as_object);
        for (name, token) in members.iter().chain(extra.into_iter().flatten()) {
            if let Some(token) = token_text(token).filter(|_| name.ends_with("_token")) {
                config.special_tokens.insert(name.clone(), token.to_owned());
            }
        }
        match members.get("chat_template") {
            Some(Value::String(text)) => config.template = Some(text.clone()),
            Some(Value::Array(named)) => {
                let find = |wanted: &str| {
                    let found = named.iter().find(|t| t["name"] == wanted);
                    found.and_then(|t| t["template"].as_str()).map(str::to_owned)
                };
                config.template = find("default");
                config.tool_template = find("tool_use");
            }
            _ => {}
        }
        Ok(config)
    }
}

/// A token given as text, or as an object with its content.
fn token_text(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

#[cfg(test)]
#[path = "model_tests.rs"]
pub(super) mod tests;
