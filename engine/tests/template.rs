//! Chat templates, as Transformers would render them.

mod common;

use std::time::{Duration, SystemTime};

use forkpoint_engine::load::Checkpoint;
use forkpoint_engine::template::{ChatTemplate, TemplateError};
use forkpoint_engine::{Message, Role, Tool};
use serde_json::json;

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, Some("<s>"), Some("</s>")).unwrap()
}

fn user(content: &str) -> Vec<Message> {
    vec![Message::new(Role::User, content)]
}

fn render(source: &str, messages: &[Message]) -> Result<String, TemplateError> {
    template(source).render(messages, &[], true)
}

fn weather() -> Tool {
    Tool {
        name: "weather".into(),
        description: Some("Tells the weather".into()),
        parameters: json!({"type": "object", "properties": {"city": {"type": "string"}}}),
    }
}

#[test]
fn the_test_model_with_and_without_a_system_turn() {
    let checkpoint = Checkpoint::open(&common::smollm2()).unwrap();
    let template = &checkpoint.template;
    let plain = template.render(&user("What is the capital of France?"), &[], true).unwrap();
    let reference = common::reference::references();
    let capital = reference.iter().find(|reference| reference.id == "capital").unwrap();
    assert_eq!(plain, capital.text);
    assert_eq!(checkpoint.tokenizer.encode(&plain), capital.token_ids);

    let turns = [
        Message::new(Role::System, "Be brief."),
        Message::new(Role::User, "Hi"),
        Message::new(Role::Assistant, "Hello"),
    ];
    let expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n\
                    <|im_start|>assistant\nHello<|im_end|>\n";
    assert_eq!(template.render(&turns, &[], false).unwrap(), expected);
    let prompted = template.render(&turns, &[], true).unwrap();
    assert_eq!(prompted, format!("{expected}<|im_start|>assistant\n"));
}

#[test]
fn a_template_may_refuse_a_conversation() {
    let source = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok";
    assert_eq!(render(source, &user("Hi")).unwrap(), "ok");
    let error = render(source, &[Message::new(Role::System, "x")]).unwrap_err();
    assert!(matches!(&error, TemplateError::Raised(message) if message == "System role not supported"));
    assert!(error.is_clients());
    // From inside a macro, too.
    let source = "{% macro check(m) %}{{ raise_exception('no ' ~ m.role) }}{% endmacro %}{% for m in messages %}{{ check(m) }}{% endfor %}";
    let error = render(source, &user("Hi")).unwrap_err();
    assert!(matches!(error, TemplateError::Raised(message) if message == "no user"));
}

#[test]
fn blocks_are_trimmed_as_jinja_is_told_to() {
    let source =
        "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend\n";
    assert_eq!(render(source, &user("Hi")).unwrap(), "Hi\nend");
}

#[test]
fn names_are_there_or_undefined() {
    let source = "{{ bos_token }}{{ tools is defined }}{{ tools is none }}{{ messages[0].tool_calls is defined }}{{ eos_token }}";
    assert_eq!(render(source, &user("Hi")).unwrap(), "<s>FalseFalseFalse</s>");
    let tools = template("{{ tools is defined }}{{ tools[0].function.name }}");
    assert_eq!(tools.render(&user("Hi"), &[weather()], true).unwrap(), "Trueweather");
    let bare = ChatTemplate::new("{{ bos_token is defined }}", None, None).unwrap();
    assert_eq!(bare.render(&[], &[], false).unwrap(), "False");
}

#[test]
fn python_methods_and_loop_controls() {
    let source = "{% for m in messages %}{% if m.content.startswith('skip') %}{% continue %}{% endif %}{{ m.content.strip().split('|')[-1] | upper }}{% break %}{% endfor %}";
    let messages = [user("skip me"), user("  a|b "), user("c")].concat();
    assert_eq!(render(source, &messages).unwrap(), "B");
}

#[test]
fn tojson_prints_as_python_does() {
    let with = |filter: &str| {
        let source = format!("{{{{ tools[0].function.parameters | {filter} }}}}");
        let tool = Tool {
            name: "t".into(),
            description: None,
            parameters: json!({"b": [1, 2.5, true, null], "a": "é<'\"\n😀", "e": {}, "l": []}),
        };
        template(&source).render(&[], &[tool], false).unwrap()
    };
    let plain = r#"{"b": [1, 2.5, true, null], "a": "é<'\"\n😀", "e": {}, "l": []}"#;
    assert_eq!(with("tojson"), plain);
    assert_eq!(with("tojson(ensure_ascii=False)"), plain);
    assert_eq!(
        with("tojson(ensure_ascii=True)"),
        plain.replace('é', "\\u00e9").replace('😀', "\\ud83d\\ude00")
    );
    let sorted = r#"{"a": "é<'\"\n😀", "b": [1, 2.5, true, null], "e": {}, "l": []}"#;
    assert_eq!(with("tojson(sort_keys=true)"), sorted);
    assert_eq!(with("tojson(separators=(',', ':'))"), plain.replace(", ", ",").replace("\": ", "\":"));
    let indented = "{\n  \"b\": [\n    1,\n    2.5,\n    true,\n    null\n  ],\n  \"a\": \"é<'\\\"\\n😀\",\n  \"e\": {},\n  \"l\": []\n}";
    assert_eq!(with("tojson(indent=2)"), indented);
    assert_eq!(with("tojson(2)"), indented);
    assert_eq!(with("tojson(indent=none)"), plain);
}

#[test]
fn tools_and_calls_have_openais_shape() {
    let tools = template("{% for t in tools %}{{ t | tojson }}{% endfor %}");
    let expected = r#"{"type": "function", "function": {"name": "weather", "description": "Tells the weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}"#;
    assert_eq!(tools.render(&[], &[weather()], false).unwrap(), expected);

    let mut call = Message::new(Role::Assistant, "");
    call.tool_calls = Some(json!([
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Paris\"}"}},
        {"id": "2", "type": "function", "function": {"name": "weather", "arguments": "not json"}},
    ]));
    let mut answer = Message::new(Role::Tool, "rain");
    answer.tool_call_id = Some("1".into());
    let source = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }};{% endfor %}{{ m.tool_call_id }}{% endfor %}";
    assert_eq!(render(source, &[call, answer]).unwrap(), r#"{"city": "Paris"};"not json";1"#);
}

#[test]
fn a_model_may_have_a_template_for_tools() {
    let both = template("plain").with_tools("tools").unwrap();
    assert_eq!(both.render(&[], &[], false).unwrap(), "plain");
    assert_eq!(both.render(&[], &[weather()], false).unwrap(), "tools");
}

#[test]
fn marks_for_training_change_nothing() {
    let source = "a {%- generation %} b {% endgeneration -%} c";
    assert_eq!(render(source, &[]).unwrap(), "a b c");
    assert_eq!(render("{{ '{% generation' }}", &[]).unwrap(), "{% generation");
}

#[test]
fn the_clock_is_ours() {
    let dated = template("{{ strftime_now('%d %B %Y') }}");
    let dated = dated.with_clock(|| SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_996_800));
    assert_eq!(dated.render(&[], &[], false).unwrap(), "30 November 2026");
    assert!(matches!(render("{{ strftime_now('%Q') }}", &[]), Err(TemplateError::Render(_))));
}

#[test]
fn budgets_and_faults() {
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
    assert!(matches!(render(endless, &[]), Err(TemplateError::Fuel)));
    assert!(matches!(render("{{ 'x' * 2000000000 }}", &[]), Err(TemplateError::Fuel)));
    assert!(matches!(ChatTemplate::new("{% if %}", None, None), Err(TemplateError::Syntax(_))));
    assert!(matches!(ChatTemplate::new(&" ".repeat(2 << 20), None, None), Err(TemplateError::Syntax(_))));
    assert!(matches!(render("{{ messages[0].a.b }}", &user("Hi")), Err(TemplateError::Render(_))));
    assert!(matches!(render("{% include 'other' %}", &[]), Err(TemplateError::Render(_))));
    let missing = ChatTemplate::missing().render(&user("Hi"), &[], true).unwrap_err();
    assert!(missing.to_string().contains("no chat template") && !missing.is_clients());
}

#[test]
fn chatml_where_the_vocabulary_has_its_marks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    let mut writer = common::gguf_writer::Tiny::default().writer();
    writer.write(&path);
    let template = Checkpoint::open(&path).unwrap().template;
    let text = template.render(&user("Hi"), &[], true).unwrap();
    assert_eq!(text, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");

    let kinds = common::gguf_writer::Value::I32s(vec![1; 270]);
    writer.set("tokenizer.ggml.token_type", kinds);
    writer.unset("tokenizer.ggml.bos_token_id");
    writer.write(&path);
    let template = Checkpoint::open(&path).unwrap().template;
    assert!(matches!(template.render(&user("Hi"), &[], true), Err(TemplateError::Missing)));
}
