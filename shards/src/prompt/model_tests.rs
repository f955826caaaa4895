use super::*;
use crate::prompt::outside_data;

/// The small real tokenizer with other files beside it; none where it is absent.
pub(crate) fn small_model(test: &str, slug: &str, config: Option<&str>, template: Option<&str>) -> Option<Model> {
    let dir = outside_data::tokenizer(test, "qwen3-mini-8k")?;
    let files = ModelFiles {
        slug: slug.into(),
        path: PathBuf::from("/tokenizers").join(slug),
        tokenizer: std::fs::read_to_string(dir.join("tokenizer.json")).unwrap(),
        config: config.map(str::to_owned),
        template: template.map(str::to_owned),
        tool_template: None,
    };
    Some(Model::load(&files, SystemTime::now).unwrap())
}

fn render(model: &Model, rule: Option<&Arc<str>>, tools: bool) -> Result<String, MissReason> {
    let chat = br#"{"messages":[{"role":"user","content":"hi"}]}"#;
    let view = crate::prompt::BodyView::parse(chat).unwrap();
    model.template(rule, tools, Engine::Vllm).and_then(|template| {
        let chat = crate::prompt::chat::ChatRequest::of_chat(&view)?;
        Ok(crate::prompt::chat::render(&chat, template, Engine::Vllm)?.text)
    })
}

#[test]
fn the_template_is_chosen_as_the_engine_chooses() {
    let test = "the_template_is_chosen_as_the_engine_chooses";
    let named = r#"{"eos_token": {"content": "</s>"}, "chat_template": [
        {"name": "default", "template": "d{{ eos_token }}"}, {"name": "tool_use", "template": "t"}]}"#;
    let Some(model) = small_model(test, "m", Some(named), None) else { return };
    assert_eq!(model.template_origin(), TemplateOrigin::Config);
    assert_eq!(render(&model, None, false).as_deref(), Ok("d</s>"));
    assert_eq!(render(&model, None, true).as_deref(), Ok("t"));
    let rule: Arc<str> = "r{{ eos_token }}".into();
    assert_eq!(render(&model, Some(&rule), true).as_deref(), Ok("r</s>"));
    assert_eq!(render(&model, Some(&"{% if".into()), true), Err(MissReason::Template));

    let model = small_model(test, "m", Some(named), Some("file")).unwrap();
    assert_eq!(model.template_origin(), TemplateOrigin::File);
    assert_eq!(render(&model, None, true).as_deref(), Ok("file"));
}

#[test]
fn with_a_tokenizer_alone_only_qwen_is_assumed() {
    let test = "with_a_tokenizer_alone_only_qwen_is_assumed";
    let Some(model) = small_model(test, "Qwen__Qwen9", None, None) else { return };
    assert_eq!(render(&model, None, false).as_deref(), Ok("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"));
    assert!(model.template_assumed());
    model.confirm_template();
    assert!(!model.template_assumed());

    let model = small_model(test, "other__model", None, None).unwrap();
    assert_eq!(render(&model, None, false), Err(MissReason::TemplateMissing));
    assert!(model.template_problem().unwrap().contains("/tokenizers/other__model/chat_template.jinja"));
    assert_eq!(render(&model, Some(&"plain".into()), false).as_deref(), Ok("plain"));
    // The special tokens are not known: printing nothing for them would be a wrong text.
    assert_eq!(render(&model, Some(&"{{ bos_token }}x".into()), false), Err(MissReason::Template));
    let model = small_model(test, "m", None, Some("{{ bos_token }}x")).unwrap();
    assert_eq!(render(&model, None, false), Err(MissReason::Template));
    assert!(model.template_problem().unwrap().contains("tokenizer_config.json"));
}

#[test]
fn templates_of_rules_are_limited() {
    let Some(model) = small_model("templates_of_rules_are_limited", "m", None, None) else { return };
    for n in 0..RULE_TEMPLATES_MAX {
        assert_eq!(render(&model, Some(&format!("t{n}").into()), false), Ok(format!("t{n}")));
    }
    assert_eq!(render(&model, Some(&"one more".into()), false), Err(MissReason::Template));
    assert_eq!(render(&model, Some(&"t3".into()), false).as_deref(), Ok("t3"));
}

#[test]
fn a_broken_template_leaves_completions() {
    let Some(model) = small_model("a_broken_template_leaves_completions", "m", None, Some("{% if")) else { return };
    assert_eq!(render(&model, None, false), Err(MissReason::Template));
    assert!(model.template_problem().unwrap().contains("does not compile"));
}

#[test]
fn chats_that_the_engine_renders_in_code_are_not_guessed() {
    let test = "chats_that_the_engine_renders_in_code_are_not_guessed";
    let Some(dir) = outside_data::tokenizer(test, "openai__gpt-oss-20b") else { return };
    let tokenizer = std::fs::read_to_string(dir.join("tokenizer.json")).unwrap();
    let files = ModelFiles { tokenizer, template: Some("x".into()), ..ModelFiles::default() };
    let model = Model::load(&files, SystemTime::now).unwrap();
    assert_eq!(render(&model, None, false), Err(MissReason::EngineRendered));
    assert!(model.template_problem().unwrap().contains("in code"));
}

#[test]
fn a_file_that_cannot_be_used_is_named() {
    let error =
        Model::load(&ModelFiles { tokenizer: "{".into(), ..ModelFiles::default() }, SystemTime::now).unwrap_err();
    assert_eq!(error.file, "tokenizer.json");
}
