"""The fixed word lists behind quire-demo's corpus: capitals, names, words, tools.

It knows plain data only, written from general knowledge; countries with several seats of
government have one common choice.  It does not know how sentences are made of the data
(tools/demo_corpus.py does) and holds nothing random.
"""

from __future__ import annotations


def _words(text: str) -> list[str]:
    """A word list, written as one string so that it stays readable."""
    return text.split()


_CAPITALS = """
Afghanistan=Kabul; Albania=Tirana; Algeria=Algiers; Andorra=Andorra la Vella; Angola=Luanda;
Antigua and Barbuda=Saint John's; Argentina=Buenos Aires; Armenia=Yerevan; Australia=Canberra;
Austria=Vienna; Azerbaijan=Baku; the Bahamas=Nassau; Bahrain=Manama; Bangladesh=Dhaka;
Barbados=Bridgetown; Belarus=Minsk; Belgium=Brussels; Belize=Belmopan; Benin=Porto-Novo;
Bhutan=Thimphu; Bolivia=Sucre; Bosnia and Herzegovina=Sarajevo; Botswana=Gaborone;
Brazil=Brasília; Brunei=Bandar Seri Begawan; Bulgaria=Sofia; Burkina Faso=Ouagadougou;
Burundi=Gitega; Cambodia=Phnom Penh; Cameroon=Yaoundé; Canada=Ottawa; Cape Verde=Praia;
the Central African Republic=Bangui; Chad=N'Djamena; Chile=Santiago; China=Beijing;
Colombia=Bogotá; the Comoros=Moroni; Costa Rica=San José; Croatia=Zagreb; Cuba=Havana;
Cyprus=Nicosia; the Czech Republic=Prague; Denmark=Copenhagen; Djibouti=Djibouti;
Dominica=Roseau; the Dominican Republic=Santo Domingo;
the Democratic Republic of the Congo=Kinshasa; East Timor=Dili; Ecuador=Quito; Egypt=Cairo;
El Salvador=San Salvador; Equatorial Guinea=Malabo; Eritrea=Asmara; Estonia=Tallinn;
Eswatini=Mbabane; Ethiopia=Addis Ababa; Fiji=Suva; Finland=Helsinki; France=Paris;
Gabon=Libreville; the Gambia=Banjul; Georgia=Tbilisi; Germany=Berlin; Ghana=Accra;
Greece=Athens; Grenada=Saint George's; Guatemala=Guatemala City; Guinea=Conakry;
Guinea-Bissau=Bissau; Guyana=Georgetown; Haiti=Port-au-Prince; Honduras=Tegucigalpa;
Hungary=Budapest; Iceland=Reykjavik; India=New Delhi; Indonesia=Jakarta; Iran=Tehran;
Iraq=Baghdad; Ireland=Dublin; Israel=Jerusalem; Italy=Rome; the Ivory Coast=Yamoussoukro;
Jamaica=Kingston; Japan=Tokyo; Jordan=Amman; Kazakhstan=Astana; Kenya=Nairobi;
Kiribati=Tarawa; Kuwait=Kuwait City; Kyrgyzstan=Bishkek; Laos=Vientiane; Latvia=Riga;
Lebanon=Beirut; Lesotho=Maseru; Liberia=Monrovia; Libya=Tripoli; Liechtenstein=Vaduz;
Lithuania=Vilnius; Luxembourg=Luxembourg; Madagascar=Antananarivo; Malawi=Lilongwe;
Malaysia=Kuala Lumpur; the Maldives=Malé; Mali=Bamako; Malta=Valletta;
the Marshall Islands=Majuro; Mauritania=Nouakchott; Mauritius=Port Louis;
Mexico=Mexico City; Micronesia=Palikir; Moldova=Chisinau; Monaco=Monaco;
Mongolia=Ulaanbaatar; Montenegro=Podgorica; Morocco=Rabat; Mozambique=Maputo;
Myanmar=Naypyidaw; Namibia=Windhoek; Nauru=Yaren; Nepal=Kathmandu;
the Netherlands=Amsterdam; New Zealand=Wellington; Nicaragua=Managua; Niger=Niamey;
Nigeria=Abuja; North Korea=Pyongyang; North Macedonia=Skopje; Norway=Oslo; Oman=Muscat;
Pakistan=Islamabad; Palau=Ngerulmud; Panama=Panama City; Papua New Guinea=Port Moresby;
Paraguay=Asunción; Peru=Lima; the Philippines=Manila; Poland=Warsaw; Portugal=Lisbon;
Qatar=Doha; the Republic of the Congo=Brazzaville; Romania=Bucharest; Russia=Moscow;
Rwanda=Kigali; Saint Kitts and Nevis=Basseterre; Saint Lucia=Castries;
Saint Vincent and the Grenadines=Kingstown; Samoa=Apia; San Marino=San Marino;
São Tomé and Príncipe=São Tomé; Saudi Arabia=Riyadh; Senegal=Dakar; Serbia=Belgrade;
the Seychelles=Victoria; Sierra Leone=Freetown; Singapore=Singapore; Slovakia=Bratislava;
Slovenia=Ljubljana; the Solomon Islands=Honiara; Somalia=Mogadishu; South Africa=Pretoria;
South Korea=Seoul; South Sudan=Juba; Spain=Madrid; Sri Lanka=Colombo; Sudan=Khartoum;
Suriname=Paramaribo; Sweden=Stockholm; Switzerland=Bern; Syria=Damascus;
Tajikistan=Dushanbe; Tanzania=Dodoma; Thailand=Bangkok; Togo=Lomé; Tonga=Nuku'alofa;
Trinidad and Tobago=Port of Spain; Tunisia=Tunis; Turkey=Ankara; Turkmenistan=Ashgabat;
Tuvalu=Funafuti; Uganda=Kampala; Ukraine=Kyiv; the United Arab Emirates=Abu Dhabi;
the United Kingdom=London; the United States=Washington; Uruguay=Montevideo;
Uzbekistan=Tashkent; Vanuatu=Port Vila; Vatican City=Vatican City; Venezuela=Caracas;
Vietnam=Hanoi; Yemen=Sanaa; Zambia=Lusaka; Zimbabwe=Harare
"""

CAPITALS: dict[str, str] = {
    country.strip(): capital.strip()
    for country, capital in (item.split("=") for item in _CAPITALS.replace("\n", " ").split(";"))
}

NAMES = _words(
    "Anna Ben Clara David Emma Felix Grace Henry Ivy Jack Kate Leo Mia Noah Olga Paul Rosa Sam "
    "Tina Victor Wendy Zoe Alice Bob Carol Dan Eve Frank Gina Hugo Iris John Kim Lucy Max Nina "
    "Oscar Pia Ravi Sara Tom Uma Vera Will Yuki Omar Lena Aisha Diego Mei"
)

ADJECTIVES = _words(
    "red blue green small big old young happy sad quiet loud bright dark warm cold brave clever "
    "gentle lazy quick slow tall tiny round soft hungry kind proud silver golden strange"
)

ANIMALS = _words(
    "fox dog cat bird horse mouse rabbit bear wolf owl frog duck goat sheep lion tiger hen fish "
    "turtle bee"
)

THINGS = _words(
    "ball book lamp key box boat hat cup stone flower tree house door wall river hill bridge "
    "garden table chair window clock letter map coin bell kite drum apple pear cake bread road "
    "forest field castle tower ship train"
)

VERBS_PAST = _words(
    "found saw took carried lost opened painted watched fixed followed wanted hid bought dropped "
    "kept liked"
)

PLACES = _words(
    "forest garden village city river hill castle farm beach market school library kitchen tower"
)

ADVERBS = _words("slowly quickly quietly happily again today yesterday often never once")

# A wider everyday vocabulary, for verbatim copies only.
_MORE_WORDS = _words(
    "the a of and to in is was for on with as by at from this that it one two three four "
    "five six seven eight nine ten water fire earth air sun moon star rain snow wind "
    "cloud storm summer winter spring autumn morning evening night day week month year "
    "time hour minute mother father sister brother friend child king queen prince teacher "
    "doctor farmer baker music song dance story game paint paper pencil page word line "
    "number question answer music milk honey salt sugar rice soup egg cheese butter fruit "
    "lemon orange plum grape iron gold wood glass sand rope wheel engine motor button "
    "screen cable signal memory model token cache batch server client packet buffer "
    "kernel thread queue table index north south east west left right up down over under "
    "before after between through run walk jump swim fly read write speak listen learn "
    "think dream sleep eat drink"
)
WORDS = sorted(set(ADJECTIVES + ANIMALS + THINGS + VERBS_PAST + PLACES + ADVERBS + _MORE_WORDS))

SYLLABLES = _words(
    "ba be bi bo da de di do fa fe ga go ka ke ki ko la le li lo ma me mi mo na ne ni no pa pe "
    "ra re ri ro sa se si so ta te ti to va ve vi wa we xa ya yo za zu tra ple gri sto chi sha"
)

ACCENTED = _words("café naïve über piñata crème garçon jalapeño smörgåsbord façade señor")

CONDITIONS = _words("sunny cloudy rainy windy snowy foggy")

LISTS: dict[str, list[str]] = {
    "fruits": _words("apple pear plum lemon orange grape"),
    "colors": _words("red blue green yellow black white"),
    "animals": _words("dog cat horse bird fish rabbit"),
    "planets": _words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune"),
    "days of the week": _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "months": _words(
        "January February March April May June July August September October November December"
    ),
}
NUMBER_WORDS = _words("zero one two three four five six seven")

MODEL_NAME = "quire-demo"
