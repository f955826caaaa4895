//! Text that costs next to nothing to make: common words in random order.

use std::sync::LazyLock;

use super::random::Random;

/// Tokens per word, punctuation included, with the demo's tokenizer (a test holds it to that).
const TOKENS_PER_WORD: f64 = 2.0;

/// Words from which texts are made.
static WORDS: LazyLock<Vec<&'static str>> = LazyLock::new(|| LIST.split_whitespace().collect());

const LIST: &str = "
a about above across act add after again age ago air all almost along also always among and animal answer any apple
area arm ask away back base be bear because become bed before begin behind best better between big bird black blue
boat body book both box bring brother build burn busy but by call came can car care carry case catch cause center
certain chair chance change children city class clear close cloud coast cold color come common complete contain
control cook corner correct cost could count country course cover cross cry cut dance day deep design did differ
direct distance do dog door down draw dream dress drive dry during each early ear earth east easy eat edge effect
egg eight end energy engine enough even evening ever every exact example eye face fact fall family far farm fast
father feel few field fight figure fill final find fine fire first fish five floor fly follow food foot for force
form found four free fresh friend from front full game garden gave general girl give glass go gold good got govern
great green ground group grow guess had half hand happen happy hard has have he head hear heart heat heavy help her
here high hill him his hold home horse hot hour house how hundred hunt idea if in inch island it job join just keep
kind king knew know lake land language large last late laugh lead learn leave left leg less let letter level lie
life light like line list listen little live local long look lot love low machine made main make man many map mark
market matter may mean measure meet men might mile milk mind minute miss money month moon more morning most mother
mountain mouth move much music must name nature near need never new next night nine no noise north note nothing
notice noun now number object ocean of off office often oil old on once one only open or order other our out over
own page paint pair paper part party pass past path pattern pay people perhaps person picture piece place plain plan
plane plant play please point poor port pose position possible power present press pretty problem produce product
proper provide public pull push put question quick quiet quite race rain ran reach read ready real reason receive
record red remember rest result rich ride right ring rise river road rock room root rope round row rule run safe
said sail salt same sand save saw say school science sea search season seat second see seem seen self sell send
sense sentence serve set seven several shape she ship shoe shop short should show side sight sign silver similar
simple since sing sister sit six size skin sky sleep slow small snow so soft soil some son song soon sound south
space speak special speed spell spend spring square stand star start state station stay steel step still stone stood
stop store story strange street string strong student study subject such sudden sugar summer sun sure surface
system table tail take talk tall teach team tell ten test than that the their them then there these they thick thin
thing think third this those though thought thousand three through time tiny to together told tone too took top
total touch toward town track trade train travel tree triangle trip trouble true try turn twenty two type under unit
until up us use usual valley value very view village visit voice vowel wait walk wall want war warm was wash watch
water wave way we wear weather week weight well went were west what wheel when where which while white who whole why
wide wild will win wind window winter wire wish with woman wonder wood word work world would write year yellow yes
yet you young your
";

/// How many words make about that many tokens; at least one.
pub(crate) fn words_for(tokens: usize) -> usize {
    ((tokens as f64 / TOKENS_PER_WORD).round() as usize).max(1)
}

/// Appends that many words, each followed by a space, a sentence ending now and then.
pub(crate) fn append(text: &mut String, random: &mut Random, words: usize) {
    let list = &*WORDS;
    text.reserve(words * 6);
    for number in 1..=words {
        text.push_str(list[random.below(list.len())]);
        text.push_str(if number % 12 == 0 { ". " } else { " " });
    }
}

/// A text of that many bytes or a sentence more, of ASCII letters, spaces and full stops.
#[must_use]
pub fn text_of_bytes(random: &mut Random, bytes: usize) -> String {
    let mut text = String::with_capacity(bytes + 16);
    while text.len() < bytes {
        append(&mut text, random, 12);
    }
    text
}

/// A text of about that many tokens.
pub(crate) fn text(random: &mut Random, tokens: usize) -> String {
    let mut text = String::new();
    append(&mut text, random, words_for(tokens));
    text.truncate(text.trim_end().len());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_have_about_the_tokens_asked_for_with_the_demos_tokenizer() {
        let json = tokenizers::canonicalize_str(crate::assets::DEMO_TOKENIZER).unwrap();
        let tokenizer = tokenizers::from_json(&json).unwrap();
        let options = tokenizers::pipeline::EncodeOptions::no_specials();
        for tokens in [32, 512, 4096] {
            let text = text(&mut Random::new(tokens as u64), tokens);
            let mut ids = Vec::new();
            tokenizer.encode_into(&text, &options, &mut ids).unwrap();
            let made = ids.len();
            assert!((tokens * 4 / 5..tokens * 5 / 4).contains(&made), "{made} tokens where {tokens} were asked for");
        }
    }
}
