//! From requests to token ids and from answers to text, with the model's own files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};
use tokenizers::pipeline::{EncodeOptions, Override, PipelineTokenizer};

use super::EngineError;
use super::template::Template;
use crate::assets;

/// Words an answer is made of, at most.
const WORDS_MAX: usize = 1024;

/// Ids that are looked at in search of words, at most.
const WORD_IDS_MAX: u32 = 60_000;

/// A model's tokenizer and template, and the words its answers are made of.
pub struct ModelText {
    tokenizer: Arc<PipelineTokenizer>,
    template: Option<Template>,
    /// Names a template may use besides the request's.
    constants: Map<String, Value>,
    id_max: u32,
    /// Tokens that are one lower-case word with a space before it, with their text: joined, they are encoded to the
    /// same ids again, so that an answer sent back in the next turn is a prefix hit as on a real engine.
    words: Arc<[(u32, String)]>,
}

impl ModelText {
    /// Loads `<directory>/<model with / replaced by __>/`, or the embedded demo model where there is no directory.
    ///
    /// # Errors
    /// A file is missing, unreadable or damaged, or the vocabulary has no words.
    pub fn load(directory: Option<&Path>, model: &str) -> Result<Self, EngineError> {
        let Some(directory) = directory else {
            let here = Path::new("(embedded)");
            return Self::new(here, assets::DEMO_TOKENIZER, Some(assets::DEMO_TOKENIZER_CONFIG), None);
        };
        let home = directory.join(model.replace('/', "__"));
        let path = home.join("tokenizer.json");
        let tokenizer = read(&path)?.ok_or_else(|| EngineError::model(&path, "there is no such file".into()))?;
        let config = read(&home.join("tokenizer_config.json"))?;
        Self::new(&home, &tokenizer, config.as_deref(), read(&home.join("chat_template.jinja"))?)
    }

    fn new(home: &Path, json: &str, config: Option<&str>, template: Option<String>) -> Result<Self, EngineError> {
        let path = home.join("tokenizer.json");
        let canonical = tokenizers::canonicalize_str(json).map_err(|e| EngineError::model(&path, e.to_string()))?;
        let tokenizer = tokenizers::from_json(&canonical).map_err(|e| EngineError::model(&path, e.to_string()))?;
        let id_max = id_max(json).map_err(|e| EngineError::model(&path, e.to_string()))?;
        let words = words(&tokenizer, id_max);
        if words.is_empty() {
            return Err(EngineError::model(&path, "the vocabulary has no word tokens to answer with".into()));
        }
        let config_path = home.join("tokenizer_config.json");
        let config: Value = serde_json::from_str(config.unwrap_or("{}"))
            .map_err(|e| EngineError::model(&config_path, e.to_string()))?;
        let template = template.or_else(|| template_of(&config));
        let template = template
            .map(|source| Template::new(source, special_tokens(&config)))
            .transpose()
            .map_err(|e| EngineError::model(&config_path, e.to_string()))?;
        Ok(Self {
            tokenizer: Arc::new(tokenizer),
            template,
            constants: special_tokens(&config),
            id_max,
            words: words.into(),
        })
    }

    /// The same model with another chat template.
    ///
    /// # Errors
    /// The template's syntax is wrong.
    pub fn with_template(&self, source: &str) -> Result<Self, String> {
        let template = Template::new(source.to_owned(), self.constants.clone()).map_err(|error| error.to_string())?;
        let (tokenizer, words) = (Arc::clone(&self.tokenizer), Arc::clone(&self.words));
        Ok(Self { tokenizer, template: Some(template), constants: self.constants.clone(), id_max: self.id_max, words })
    }

    /// The ids of a text.
    ///
    /// # Errors
    /// The tokenizer's own message.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, String> {
        let options = EncodeOptions {
            add_special_tokens,
            padding: Override::Off,
            truncation: Override::Off,
            ..EncodeOptions::default()
        };
        encode(&self.tokenizer, text, &options)
    }

    /// Renders a chat.
    ///
    /// # Errors
    /// There is no template, or it refuses the messages.
    pub fn render(&self, variables: Map<String, Value>) -> Result<String, String> {
        let template = self.template.as_ref().ok_or("the model has no chat template")?;
        template.render(variables).map_err(|error| error.to_string())
    }

    /// Largest id of the vocabulary.
    #[must_use]
    pub fn id_max(&self) -> u32 {
        self.id_max
    }

    /// The answer to a prompt: `length` words drawn from `seed`.
    #[must_use]
    pub fn answer(&self, mut seed: u64, length: usize) -> Vec<u32> {
        (0..length)
            .map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                self.words[(seed >> 33) as usize % self.words.len()].0
            })
            .collect()
    }

    /// The text of one token of an answer.
    #[must_use]
    pub fn word(&self, id: u32) -> &str {
        match self.words.binary_search_by_key(&id, |(word, _)| *word) {
            Ok(place) => &self.words[place].1,
            Err(_) => "",
        }
    }
}

/// The file's text; none where there is no file.
fn read(path: &PathBuf) -> Result<Option<String>, EngineError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(EngineError::model(path, error.to_string())),
    }
}

fn encode(tokenizer: &PipelineTokenizer, text: &str, options: &EncodeOptions) -> Result<Vec<u32>, String> {
    let mut tokens = Vec::with_capacity(text.len() / 3);
    tokenizer.encode_into(text, options, &mut tokens).map_err(|error| error.to_string())?;
    Ok(tokens.iter().map(|token| token.id()).collect())
}

fn words(tokenizer: &PipelineTokenizer, id_max: u32) -> Vec<(u32, String)> {
    let options = EncodeOptions::no_specials();
    let word = |id: u32| {
        let text = tokenizer.decode(&[id], true).ok()?;
        let letters = text.strip_prefix(' ')?;
        let plain = letters.len() >= 2 && letters.bytes().all(|byte| byte.is_ascii_lowercase());
        // Two in a row, because some tokenizers treat the first word of a text in their own way.
        let twice = encode(tokenizer, &format!("{text}{text}"), &options).ok()?;
        (plain && twice == [id, id]).then_some((id, text))
    };
    (0..=id_max.min(WORD_IDS_MAX)).filter_map(word).take(WORDS_MAX).collect()
}

fn id_max(json: &str) -> serde_json::Result<u32> {
    let file: Value = serde_json::from_str(json)?;
    let vocabulary = match &file["model"]["vocab"] {
        Value::Object(ids) => ids.values().filter_map(Value::as_u64).max().unwrap_or(0),
        Value::Array(pieces) => pieces.len().saturating_sub(1) as u64,
        _ => 0,
    };
    let added = file["added_tokens"].as_array().into_iter().flatten().filter_map(|token| token["id"].as_u64()).max();
    Ok(u32::try_from(vocabulary.max(added.unwrap_or(0))).unwrap_or(u32::MAX))
}

/// `chat_template`: a string, or a list of named ones of which `default` is used.
fn template_of(config: &Value) -> Option<String> {
    match &config["chat_template"] {
        Value::String(source) => Some(source.clone()),
        Value::Array(named) => {
            let default = named.iter().find(|entry| entry["name"] == "default")?;
            default["template"].as_str().map(str::to_owned)
        }
        _ => None,
    }
}

/// `bos_token` and the like: strings, or objects with a `content`.
fn special_tokens(config: &Value) -> Map<String, Value> {
    let named = config.as_object().into_iter().flatten().filter(|(name, _)| name.ends_with("_token"));
    let text = |value: &Value| value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned);
    named.filter_map(|(name, value)| Some((name.clone(), Value::String(text(value)?)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_demo_model_answers_in_words_that_encode_to_themselves() {
        let model = ModelText::load(None, assets::DEMO_MODEL).expect("the embedded files are right");
        let ids = model.answer(42, 200);
        let text: String = ids.iter().map(|id| model.word(*id)).collect();
        assert_eq!(model.encode(&text, false).as_ref(), Ok(&ids));
        assert!(ids.iter().all(|id| *id <= model.id_max()));
        assert_eq!(ids, model.answer(42, 200));
        assert_ne!(ids, model.answer(43, 200));
    }

    #[test]
    fn the_demo_template_is_chatml_and_its_markers_are_single_tokens() {
        let model = ModelText::load(None, assets::DEMO_MODEL).expect("the embedded files are right");
        let variables = json!({
            "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}],
            "add_generation_prompt": true,
        });
        let text = model.render(variables.as_object().expect("an object").clone()).expect("the template renders");
        let expected =
            "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(text, expected);
        assert_eq!(model.encode("<|im_start|><|im_end|><|endoftext|>", false).map(|ids| ids.len()), Ok(3));
    }

    #[test]
    fn missing_and_damaged_files_are_named() {
        let directory = std::env::temp_dir().join(format!("kvlane-text-{}", std::process::id()));
        let missing = ModelText::load(Some(&directory), "no/such").err().expect("there is nothing").to_string();
        assert!(missing.contains("no__such"), "{missing}");
        let model = assets::stage(&directory).expect("the temporary directory can be written");
        assert!(ModelText::load(Some(&directory), assets::DEMO_MODEL).is_ok());
        std::fs::write(model.join("tokenizer.json"), "{").expect("the file can be written");
        let damaged = ModelText::load(Some(&directory), assets::DEMO_MODEL).err().expect("it is damaged").to_string();
        assert!(damaged.contains("tokenizer.json"), "{damaged}");
        std::fs::remove_dir_all(&directory).expect("our own directory can be removed");
    }
}
