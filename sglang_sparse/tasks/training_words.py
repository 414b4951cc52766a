# SPDX-License-Identifier: Apache-2.0
"""Nouns that training alone sees, beside the words of the training split, by kind.

A model that is trained on few words learns them by heart and reads no others. These are nouns of
WordNet 3.0 by their hypernyms, without those that a sentence or a question contains.

WordNet 3.0 is Copyright 2006 by Princeton University, https://wordnet.princeton.edu/license.
"""

WORDS: dict[str, str] = {
    "place": """
airframe apadana apartment auditorium aviary ballpark balustrade banister barnyard barrack
barricade barrier bathhouse bathroom bazaar bedchamber bedroom belfry bioscope bivouac blockhouse
bombproof boutique bower breakwater breastwork bunker cab cabana cache cafe cafeteria cantonment
cardroom casino chancel charnel chateau classroom clearstory cleat clerestory clubhouse cockloft
cockpit commissary convent cookfire coop corral creche cupboard dam deli derrick dispensary dive
doghouse drawer drugstore dugout dungeon earthwork edifice embankment embassy equipoise estaminet
fanlight feedlot fireplace flange footbridge foyer furnace ginmill grate gravestone greenroom
grill grocery groyne haven hayrack hearth hencoop hostelry hotel hurdle hut hutment igloo imaret
infirmary inn jail jalousie kiosk latrine lavatory locker lockup lunchroom manor manse mantelet
mantlet marquee mausoleum megalith monument morgue motel mudguard musjid nightclub oast obelisk
overhang parsonage penthouse pinfold pinnacle porch privy prop pylon rampart refectory revetment
roadhouse salon saloon sash sawhorse schoolroom scoreboard shack shanty showroom shrine sickbay
sickroom silo skylight skyscraper slopshop smokehouse soundbox speakeasy spire steakhouse steeple
stockade stockyard storeroom stupa sunroom synagogue tailgate taphouse tavern teashop teepee
tenement tent theatre tine tollgate tollhouse trestle turnpike verandah vestibule wardroom
watchtower weir windbreak winery woodshed
""",
    "thing": """
accessory aiglet alb anorak apparel armor attire balaclava baldric baldrick bandage bandoleer
bandolier basinet bathrobe beanie bedroll berretta bicorn biggin birdhouse blazer blinder
blindfold boa boater bodice bola bolo bonnet bootee boothose bootie bowtie brassard brassiere
broadloom brogue brolly buckler burka burnouse busby byrnie cabasset caftan calash calcimine
caleche calpac calpack camail capote capuchin carpet casquet casquetel cassock cataplasm
cellophane chadar chaddar chador chanfron chapeau chasuble chemise chino chuddar clingfilm cloak
cloche clodhopper coat coattail collet coronet cot coverlet cozy crankcase cravat crinoline cuff
dashiki deadlight denim derby dhoti diadem diaper doublet drape drapery drugget duvet earflap
epauliere escutcheon espadrille fallboard fauld fedora ferrule festoon fichu finery flipper
footgear footwear formalwear frock gaiter galosh gambrel gamp garb garment gasmask geta golosh
gorget gouache greatcoat greave gymslip habergeon haick haik hairpiece handwear havelock headgear
headscarf hearthrug henroost hijab holster hoopskirt housecoat housepaint housetop huarache
jackboot jambeau jean jerkin jodhpur kalansuwa kalpac kameez kepi kerchief kirtle
knitwear lambrequin lapel lederhosen leghorn leotard mack maillot manta mantilla maxi middy mini
miniskirt mobcap moccasin muff mulch muumuu nammad nappy neckcloth necktie nightgown nightshirt
niqab nosepiece outerwear overall overcoat overlay overlayer overshoe overskirt paint pajama
pantsuit panty parka patina pavise peacoat peignoir pelisse pinafore poncho pontifical porkpie
puttee radome raglan raiment raincoat rainfly refractory reversible revetement robe sabaton sallet
sarape sari scapulary screwtop scuffer seatbelt shawl sheath shield shinpad shirt shirtwaist shoji
sinapism singlet skullcap sleeve slicker slipcover slipper sneaker snowsuit sock solleret soutane
spacesuit splasher sportswear stomacher sunblind sunbonnet sunhat sunroof sunshade sunsuit surcoat
suspender sweater sweatshirt sweatsuit swimsuit tabi tailcoat tam tarboosh tasse tirolean toga
topcoat topee topi topknot toque toupee tourniquet tricorn tricorne trouser turban turtleneck tux
tuxedo undershirt underskirt unitard veneer ventail vest vestment visor waistcoat wig wimple
windscreen windshield workwear wrap wrapper yarmelke yarmulka yarmulke yashmac yashmak
""",
    "animal": """
bear bee beef beefalo beetle blennioid bloodhound bluefish booklouse botfly bottlenose bovid
bowfin brant briard bronc buckskin budgerygah bumblebee burbot bushtit cacomixle caecilian capsid
carabao caribe carinate cattle cavy cazique cedarbird cercaria cero chacma chalcidfly charger
charr chevrotain chick chickadee chimpanzee chub chunga cicada clam clupeid cockatoo cockroach
conch cootie cottonwick cow coyote crocodile crowbait cur dabchick dachshund deer dhole dobbin dun
dunnock feline female filly firebird fissiped flathead flea fowl frog galago gamecock geoduck
geometrid glossina gnawer gooney gorgonian grison grivet guib hagfish hawfinch heathfowl hedgehog
hirudinean hogget homeotherm homotherm honeybee hookworm horsefly hound hydrozoan jackdaw
javelina jument kanchil kea kingbird kingsnake ladyfish lampshell lapdog larva leafhopper leech
leppy lerot lintwhite livestock locust lovebird lugworm lungfish maggot mammal mare marmot mastiff
megapode meloid menhaden milcher minah mojarra momot mosquito moth mulloway mummichog mustang
musteline nuthatch nylghai paca pangolin parakeet petrel phasmid pichiciago piggy pilotfish
pinfish pinto pipistrel planaria planula pooch porbeagle porcupine possum poultry praya puffbird
pug punkey punkie punky pup puppy queenfish racehorse ratel rattler redbone redbreast reedbird
reptile rhino ridgel riflebird rockchuck salmonid sandgrouse sapsucker saurel scaphopod scarab
scaup seagull seahorse serpent serranid shark sheep sidewinder silkworm silverback silverfish
sipunculid snail spadefoot spaniel steed stiltbird stirk stray sumpter swamphen tadpole tailorbird
tanager tardigrade tayra tendrac teredinid teredo theridiid threadfin timucu tinamou trepang
trilobite tropicbird tunicate tyrannid vertebrate wallaby waterdog weevil whiteface whitetail
wirehair wolffish woodpecker yellowtail
""",
    "job": """
baggageman bagger bargee barkeep barkeeper barmaid barman bartender baster bellhop bibliothec
blackleg boatswain bricklayer brigadier busboy canoeist carabinier caregiver carhop cavalryman
charwoman clinician clocksmith coachman colonel commandant commando commissar compositor
consultant copilot copywriter coroner corporal counsel counselor courtier cowboy cowhand cowherd
cowpuncher craftsman critic cupbearer deacon decorator diemaker diesinker dietitian digger docent
dockworker domestic doorkeeper doughboy drover farmhand feller fieldhand figurer fisher fodder
framer freelancer galvaniser general geographer gillie goatherd gofer grenadier gunner handyman
headmaster healer helper homeopath hotshot huntsman hussar hygienist journeyman jurist juror
juryman justiciary laborer lasher lecturer licenser lighterman linkboy linkman lockkeeper logger
longbowman lovely machinist magistrate mahout maid mailman manservant mariner marksman masseur
menial millwright mineworker missionary mixologist mnemonist mortician muzzler nailer naprapath
naturopath navigator newsboy noncom nuncio nurseryman packer paddler panelist panellist pantryman
paramedic pedagog pediatrist pharmacist physician pigman pistoleer plaiter plantsman plasterer
platelayer plier ploughman podiatrist preceptor presbyter private prof prosecutor provincial
pruner puncher punter purser qadi quarrier racker ragsorter recruit redact redcoat refiner
repairman reservist restorer reviewer rewriter rifleman riveter rivetter roofer ropemaker
salesgirl saleslady salesman schoolmarm scourer scullion seafarer seasoner selectman seneschal
sergeant servant sheller sherlock shill shoveler shoveller sniper sommelier soundman
specialist splicer sprayer sprigger sprog squire stacker stagehand stocktaker striver styler
subeditor subtracter supermodel swagger tapster taster taxer teamster techie technician therapist
thrower tinsmith tinter tracklayer trainman trapper troller turncock valet valuator vaquero
vestryman veteran virtuoso vizier vulcaniser weaver webmaster whiz wingman wizard woodcarver
workman yardman
""",
}
